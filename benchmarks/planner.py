"""The planner on published questions, and the cost models on published measurements. No GPU is needed.

    .venv/bin/python -m benchmarks.planner      writes benchmarks/results/planner.json

Each question is asked of `baton plan`'s own functions, finalists simulated; beside each stands what was published.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.catalog import data_text, hardware, model_shape
from baton.decide.cost.engine_profile import engine_profile
from baton.decide.cost.parallel import Parallel
from baton.decide.cost.roofline import RooflineCost
from baton.lab.plan.capacity import decode_capacity, mixed_capacity, prefill_capacity
from baton.lab.plan.demand import LengthClass
from baton.lab.plan.link import LinkAdvice, link_advice
from baton.lab.plan.options import build_options
from baton.lab.plan.published import predicted_tokens_per_s, published_rates
from baton.lab.plan.recommend import PlanReport, make_report, recommend
from baton.lab.plan.search import Search
from baton.lab.plan.spec import read_plan_input

RESULT = Path(__file__).parent / "results" / "planner.json"
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "distserve-example": (
        "OPT-13B, 512 in, 64 out, A100: mixed 1.6 req/s per GPU; 2 prefill + 1 decode 3.3, 2.1 times as much",
        {
            "llm": "opt-13b", "engine": "vllm-2023", "objective": "goodput-per-gpu",
            "hardware": [{"name": "a100", "gpus": 4}], "slo": {"ttft_s": 0.4, "tpot_s": 0.04},
            "workload": {"input_tokens": 512, "output_tokens": 64},
        },
    ),
    "dynamo-one-node": (
        "Llama-70B fp8, 3,000 in, 150 out, 8 H100: mixed is ahead below about 30 tokens/s per user",
        {
            "llm": "llama3.1-70b", "weights": ["fp8"], "objective": "goodput-per-gpu",
            "hardware": [{"name": "h100", "gpus": 8}],
            "slo": {"ttft_s": 3.0, "tpot_s": 0.02, "attainment_ratio": 0.5},
            "workload": {"input_tokens": 3000, "output_tokens": 150},
        },
    ),
    "deepseek-nodes": (
        "DeepSeek-V3, prompts of 2,000: DeepSeek 14.8k tokens/s out per 8 H800",
        {
            "llm": "deepseek-v3", "weights": ["fp8"], "finalists": 0, "hardware": [{"name": "h800", "gpus": 64}],
            "slo": {"ttft_s": 3.0, "tpot_s": 0.06}, "workload": {"input_tokens": 2000, "output_tokens": 500},
        },
    ),
    "mooncake-break-even": (
        "Llama-3-70B, prefix of 8,192 tokens, 8 A800: the break-even bandwidth is 6 GB/s",
        {
            "llm": "llama3.1-70b", "tp": [8], "objective": "goodput-per-gpu", "finalists": 0,
            "hardware": [{"name": "a800", "gpus": 16}], "slo": {"ttft_s": 30.0, "tpot_s": 0.1},
            "workload": {"input_tokens": 8192, "output_tokens": 200},
        },
    ),
}  # fmt: skip


def splitwise_errors() -> dict[str, dict[str, float]]:
    """Mean relative errors of the roofline on Splitwise's profile: short and long prompts, decode."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(data_text("splitwise.csv").splitlines()):
        llm, gpu, tp = row["llm"], row["hardware"], int(row["tp"])
        cost = RooflineCost(
            model=model_shape(llm), hardware=hardware(gpu), parallel=Parallel(tp=tp),
            engine=engine_profile("splitwise-vllm", llm=llm, gpu=hardware(gpu), tp=tp),
        )  # fmt: skip
        tokens, batch = int(row["prompt_tokens"]), int(row["batch"])
        prompt = StepShape(
            prefill_tokens=tokens * batch, prefill_chunks=batch, prefill_pairs=batch * prefill_pairs(tokens, 0)
        )
        decode = StepShape(decode_requests=batch, context_tokens=batch * (tokens + 64))
        kind = "prompts above 2048 tokens" if tokens * batch > 2048 else "prompts to 2048 tokens"
        where = errors[f"{llm} {gpu} tp{tp}"]
        where[kind].append(abs(cost.step_s(prompt) * 1e3 / float(row["prompt_ms"]) - 1))
        where["decode"].append(abs(cost.step_s(decode) * 1e3 / float(row["token_ms"]) - 1))
    return {name: {kind: round(mean(found), 4) for kind, found in kinds.items()} for name, kinds in errors.items()}


def search(raw: dict[str, Any]) -> Search:
    question = read_plan_input(raw, Path())
    found, _ = build_options(question.choices, question.stocks, None)
    return Search(
        demand=question.demand,
        options=found,
        objective=question.spec.objective,
        same_host=question.same_host,
        pool_penalty_ratio=question.spec.pool_penalty_ratio,
    )


def dynamo_gain(user_tokens_per_s: float) -> float:
    """Dynamo's own topology (4 prefill workers of tp 1, 1 decode worker of tp 4) over the best mixed workers."""
    found = search(QUESTIONS["dynamo-one-node"][1])
    demand = replace(found.demand, slo=msgspec.structs.replace(found.demand.slo, tpot_s=1 / user_tokens_per_s))
    by_tp = {option.cost.parallel.tp: option for option in found.options}
    mixed = max(8 / tp * mixed_capacity(option, demand, workers=8 // tp).rate_rps for tp, option in by_tp.items())
    prefill = 4 * prefill_capacity(by_tp[1], demand, workers=4).rate_rps
    return min(prefill, decode_capacity(by_tp[4], demand, workers=1, same_host=True).rate_rps) / mixed


SHAREGPT = (
    237, 283, 315, 335, 364, 407, 440, 464, 513, 539, 556, 623, 654, 706, 735, 796, 880, 957, 1035, 1111, 1177, 1312,
    1522, 2159,
)  # fmt: skip
"""ShareGPT prompts in 24 classes of equal weight, scaled to DistServe's mean of 755 tokens."""


def distserve_optimum() -> list[dict[str, float]]:
    """One prefill and one decode worker on at most 4 A100, OPT-13B, TTFT 0.2 s, TPOT 0.1 s: best pair first."""
    raw = QUESTIONS["distserve-example"][1]
    found = search({**raw, "engine": "distserve", "tp": [1, 2, 4], "slo": {"ttft_s": 0.2, "tpot_s": 0.1}})
    demand = replace(found.demand, lengths=tuple(LengthClass(tokens, 200, 1 / len(SHAREGPT)) for tokens in SHAREGPT))
    pairs: list[dict[str, float]] = []
    for prefill, decode in product(found.options, found.options):
        gpus = prefill.facts.gpus + decode.facts.gpus
        first = prefill_capacity(prefill, demand, workers=1).rate_rps
        second = decode_capacity(decode, demand, workers=1, same_host=True).rate_rps
        tps = {"prefill_tp": prefill.cost.parallel.tp, "decode_tp": decode.cost.parallel.tp}
        if gpus <= 4:
            pairs.append({**tps, "gpu_rps": round(min(first, second) / gpus, 3)})
    return sorted(pairs, key=lambda pair: -pair["gpu_rps"])


def break_even(gpu: str) -> LinkAdvice:
    """Mooncake's question on one kind of GPU."""
    found = search({**QUESTIONS["mooncake-break-even"][1], "hardware": [{"name": gpu, "gpus": 8}]})
    return link_advice(found.options[0], found.demand, same_host=False)


def ask(raw: dict[str, Any]) -> PlanReport:
    return make_report(recommend(read_plan_input(raw, Path())))


def published_throughput() -> list[dict[str, Any]]:
    """Published throughput in fp8, and what the cost model predicts: for kernels alone, and with vLLM's overhead."""
    return [
        {
            "setting": rate.setting, "source": rate.source, "output_tokens": rate.output_tokens,
            "published_tokens_per_s": rate.tokens_per_s,
            **{
                f"{engine}_tokens_per_s": round(predicted_tokens_per_s(rate, engine)) for engine in ("ideal", "vllm-v1")
            },
        }
        for rate in published_rates()
    ]  # fmt: skip


def main() -> None:
    found: dict[str, Any] = {
        "command": ".venv/bin/python -m benchmarks.planner",
        "roofline_mean_errors_on_splitwise": splitwise_errors(),
        "published_throughput": published_throughput(),
        "distserve_optimum": distserve_optimum(),
        "dynamo_topology_gain_by_user_tokens_per_s": {
            speed: round(dynamo_gain(speed), 3) for speed in (10, 15, 20, 22, 24, 26, 30, 40, 50)
        },
        "break_even": {gpu: msgspec.to_builtins(break_even(gpu)) for gpu in ("a800", "h800")},
        "plans": {
            name: {"published": published, "question": raw, "answer": msgspec.to_builtins(ask(raw))}
            for name, (published, raw) in QUESTIONS.items()
        },
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    for name, plan in found["plans"].items():
        print(name, "-", plan["answer"]["fleet"], f"{plan['answer']['value']:.3g}")


if __name__ == "__main__":
    main()
