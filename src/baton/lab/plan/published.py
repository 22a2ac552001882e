"""Published throughput in fp8, to judge the cost model: what it predicts for the same model, GPUs and lengths."""

from __future__ import annotations

import csv
from functools import cache

from msgspec import Struct, convert

from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.catalog import data_text, hardware, model_shape
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.parallel import Parallel, Precision, split_memory
from baton.decide.cost.roofline import RooflineCost
from baton.lab.plan.planned_fleet import WorkerGroup

STEP_TOKENS = 8192
"""Prompt tokens of a step, per attention group: the default of the engines that were measured."""
REQUESTS_MAX = 2048
"""Largest number of requests that decode at once: the default of the engines that were measured."""
FP8 = Precision(weights="fp8", kv="fp8")


class PublishedRate(Struct, frozen=True, kw_only=True):
    """Throughput of one saturated worker in fp8, as its source published it."""

    llm: str
    hardware: str
    tp: int
    dp: int
    input_tokens: int
    output_tokens: int
    """0: the worker computes prompts only."""
    tokens_per_s: float
    """Output tokens of the worker, or, of a worker that computes prompts only, input tokens of each of its nodes."""
    source: str

    @property
    def setting(self) -> str:
        """Name such as `llama3.1-70b, H100-80G-SXM tp2, 2048 in, 128 out`."""
        degrees = f"dp{self.dp}" if self.dp > 1 else f"tp{self.tp}"
        lengths = f"{self.input_tokens} in" + (f", {self.output_tokens} out" if self.output_tokens else "")
        return f"{self.llm}, {self.hardware} {degrees}, {lengths}"


@cache
def published_rates() -> tuple[PublishedRate, ...]:
    """Return the published rates, whose sources are in `decide/cost/data/README.md`."""
    rows = csv.DictReader(data_text("published.csv").splitlines())
    return tuple(convert(row, PublishedRate, strict=False) for row in rows)


def predicted_tokens_per_s(rate: PublishedRate, engine: str) -> float:
    """Return the throughput that the cost model predicts in the unit of `rate`, with this engine's profile.

    A saturated worker spends all its time on prompts in full steps and on decodes in batches that fill its KV memory.
    """
    gpu, parallel = hardware(rate.hardware), Parallel(tp=rate.tp, dp=rate.dp, ep=rate.dp)
    model, profile = model_shape(rate.llm), engine_profile(engine, llm=rate.llm, gpu=gpu, tp=rate.tp)
    cost = RooflineCost(model=model, hardware=gpu, parallel=parallel, precision=FP8, engine=profile)
    prompts = rate.dp * max(1, STEP_TOKENS // rate.input_tokens)
    together = StepShape(
        prefill_tokens=prompts * rate.input_tokens, prefill_chunks=prompts,
        prefill_pairs=prompts * prefill_pairs(rate.input_tokens, 0),
    )  # fmt: skip
    prompt_s = cost.step_s(together) / prompts
    if not rate.output_tokens:
        return rate.input_tokens / prompt_s * gpu.gpus_per_node / parallel.gpus
    context = rate.input_tokens + rate.output_tokens / 2
    requests = min(REQUESTS_MAX, int(split_memory(model, gpu, parallel, FP8).kv_tokens / context))
    step_s = cost.step_s(StepShape(decode_requests=requests, context_tokens=round(requests * context)))
    return rate.output_tokens / (prompt_s + rate.output_tokens * step_s / requests)


def describe_published(group: WorkerGroup, engine: str) -> list[str]:
    """Return a line about the published rate of the group's model in fp8 on its GPU. Empty if there is none."""
    cost = group.option.cost
    if cost.precision.weights != "fp8":
        return []
    known = [
        rate
        for rate in published_rates()
        if (rate.llm, rate.hardware) == (cost.model.name, group.option.stock.hardware.name)
    ]
    if not known:
        return []
    rate = min(known, key=lambda rate: abs(rate.tp * rate.dp - cost.parallel.gpus))
    predicted = predicted_tokens_per_s(rate, engine)
    return [
        f"published for comparison: {rate.setting}: {rate.tokens_per_s:,.0f} tokens/s ({rate.source}); the cost model "
        f"of {engine} predicts {predicted:,.0f} there"
    ]
