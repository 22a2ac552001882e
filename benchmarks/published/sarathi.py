"""Sarathi-Serve's capacity (OSDI 2024, figure 10): Mistral-7B on one A100 and Yi-34B on two, against vLLM and Orca.

    python benchmarks/published/sarathi.py [--requests N] [--model mistral-7b|yi-34b ...]

Capacity is the highest rate at which the 99th percentile of the gaps between tokens is within the limit and the median
request waits for at most 2 s. Steps have 512 tokens under the strict limit and 2,048 under the relaxed one. Published:
the gain over the better of the two, by load and limit, as quoted in reading notes of the paper. Neither set of lengths
(openchat_sharegpt4, arxiv_summarization) was obtained: they are drawn log-normal with the published medians of prompts,
1,730 and 7,059 tokens. vLLM puts whole prompts first, Orca computes whole prompts beside decodes; step times are those
of vLLM of 2023. Writes benchmarks/results/published-sarathi.json.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from itertools import product
from random import Random
from statistics import median

import numpy as np
from msgspec.structs import replace
from outcome import CLUSTERS, store
from systems import PROMPTS_FIRST, WHOLE_PROMPTS, with_cost

from baton.core.config import BatchLimits, PolicyConfig
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.amounts import LogNormal
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.schedule import redraw_arrivals

WAIT_S = 2.0
CONTEXT_TOKENS = 16_384
RATE_STEP = 1.05
CHUNK_TOKENS = {"strict": 512, "relaxed": 2048}
MODELS = {"mistral-7b": "sarathi-mistral7b-1xa100.yaml", "yi-34b": "sarathi-yi34b-2xa100.yaml"}
GAPS_S = {"mistral-7b": {"strict": 0.1, "relaxed": 0.5}, "yi-34b": {"strict": 0.2, "relaxed": 1.0}}
"""Limits of the 99th percentile: 5 and 25 times a step of decode."""
PUBLISHED = {
    "mistral-7b": {"chat": {"strict": 2.78, "relaxed": 2.15}, "articles": {"strict": 1.82, "relaxed": 1.97}},
    "yi-34b": {"chat": {"strict": 4.00, "relaxed": 2.44}, "articles": {"strict": 1.69, "relaxed": 1.94}},
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Medians of prompts and answers, and how widely they are spread: standard deviation over mean."""

    prompt_tokens: float
    answer_tokens: float
    prompt_cv: float
    answer_cv: float

    def draw(self, draw: Random) -> TraceRequest:
        prompt = round(_lognormal(self.prompt_tokens, self.prompt_cv, CONTEXT_TOKENS // 2).sample(draw))
        answer = round(_lognormal(self.answer_tokens, self.answer_cv, CONTEXT_TOKENS // 2).sample(draw))
        return TraceRequest(at_s=0.0, input_tokens=prompt, output_tokens=answer)


def _lognormal(median_tokens: float, cv: float, high: float) -> LogNormal:
    return LogNormal(mean=median_tokens * math.sqrt(1 + cv**2), cv=cv, low=4, high=high)


LENGTHS = {"chat": Lengths(1730, 415, 1.0, 0.5), "articles": Lengths(7059, 208, 0.5, 0.8)}


def load(lengths: Lengths, requests: int, rate_rps: float) -> Trace:
    draw = Random(0)
    trace = Trace(format="made", timing="absolute", requests=tuple(lengths.draw(draw) for _ in range(requests)))
    return redraw_arrivals(trace, PoissonArrivals(rate_rps), Random(1))


def holds(spec: ClusterSpec, policy: PolicyConfig, trace: Trace, gap_s: float) -> bool:
    """Whether gaps and waits are within their limits."""
    records, cost = replay_trace(spec, trace, policy=policy, seed=0), spec.cost_model().on("a100")
    gaps_s = np.concatenate([np.diff(np.asarray(record.token_times_s)) for record in records])
    waits_s = [
        (record.ttft_s or 0.0) - cost.prefill_s(new_tokens=record.input_tokens, cached_tokens=0) for record in records
    ]
    return float(np.quantile(gaps_s, 0.99)) <= gap_s and median(waits_s) <= WAIT_S


def capacity_rps(spec: ClusterSpec, policy: PolicyConfig, lengths: Lengths, requests: int, gap_s: float) -> float:
    """Find the highest rate that holds, to 5 %. 0 where not even a twentieth of a request a second does."""
    low, high = 0.05, 20.0
    if not holds(spec, policy, load(lengths, requests, low), gap_s):
        return 0.0
    while high / low > RATE_STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(spec, policy, load(lengths, requests, middle), gap_s) else (low, middle)
    return low


def systems(base: ClusterSpec, chunk_tokens: int) -> dict[str, tuple[ClusterSpec, PolicyConfig]]:
    def with_step(tokens: int) -> ClusterSpec:
        return replace(base, batch=BatchLimits(step_tokens_max=tokens, requests_max=base.batch.requests_max))

    return {
        "vllm": (with_step(CONTEXT_TOKENS), PROMPTS_FIRST),
        "orca": (with_step(CONTEXT_TOKENS), replace(POLICY_SETS["sarathi"], batching=WHOLE_PROMPTS)),
        "sarathi": (with_step(chunk_tokens), POLICY_SETS["sarathi"]),
    }


def rates_rps(base: ClusterSpec, model: str, limit: str, lengths: Lengths, requests: int) -> dict[str, float]:
    """Find what each system serves."""
    return {
        name: round(capacity_rps(spec, policy, lengths, requests, GAPS_S[model][limit]), 3)
        for name, (spec, policy) in systems(base, CHUNK_TOKENS[limit]).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    for model, (load_name, lengths), limit in product(args.model or MODELS, LENGTHS.items(), CHUNK_TOKENS):
        base = with_cost(read_spec(CLUSTERS / MODELS[model]), {"engine": "vllm-2023"})
        rates = rates_rps(base, model, limit, lengths, args.requests)
        best = max(rates["vllm"], rates["orca"])
        gain = round(rates["sarathi"] / best, 2) if best else None
        row = {"model": model, "load": load_name, "limit": limit, **rates, "gain": gain}
        found.append({**row, "published_gain": PUBLISHED[model][load_name][limit]})
        print(found[-1], flush=True)
    store("sarathi", {"requests": args.requests, "simulated_rps": found})


if __name__ == "__main__":
    main()
