"""Published results that the planner must come to by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from baton.lab.plan.capacity import decode_capacity, mixed_capacity, mixed_capacity_at, prefill_capacity
from baton.lab.plan.demand import LengthClass, WorkloadDemand
from baton.lab.plan.link import link_advice
from baton.lab.plan.options import WorkerOption
from tests.unit.lab.plan.questions import WORKED, search


def test_distserves_worked_example() -> None:
    """13B, 512 in, 64 out: two prefill workers and one decode worker give 2.1 times what colocation does per GPU.

    Colocated as vLLM did it then, prompts whole; cut into chunks, our mixed workers come closer.
    """
    found = search(WORKED)
    best, mixed = found.fleet("best"), found.fleet("mixed")
    assert best is not None
    assert mixed is not None
    assert best.name == "2 x prefill A100-80G-SXM tp1 + 1 x decode A100-80G-SXM tp1"
    whole = mixed_capacity_at(found.options[0], found.demand, workers=1, step_tokens=2048)
    assert 1.5 < best.value("goodput-per-gpu") / whole.rate_rps < 2.5
    assert 1.0 < best.value("goodput-per-gpu") / mixed.value("goodput-per-gpu") < 1.5


INPUTS = (
    237, 283, 315, 335, 364, 407, 440, 464, 513, 539, 556, 623, 654, 706, 735, 796, 880, 957, 1035, 1111, 1177, 1312,
    1522, 2159,
)  # fmt: skip
"""ShareGPT prompts in 24 classes of equal weight, scaled to DistServe's mean of 755 tokens; answers of 200."""


def test_distserves_optimum_for_opt_13b() -> None:
    """One prefill and one decode worker on at most 4 A100: tp 2 and tp 1, 1.56 req/s per GPU. Ours: 1.7 to 1.8."""
    found = search({**WORKED, "engine": "distserve", "tp": [1, 2, 4], "slo": {"ttft_s": 0.2, "tpot_s": 0.1}})
    lengths = tuple(LengthClass(tokens, 200, 1 / len(INPUTS)) for tokens in INPUTS)
    demand = replace(found.demand, lengths=lengths)

    def per_gpu(prefill: WorkerOption, decode: WorkerOption) -> float:
        first = prefill_capacity(prefill, demand, workers=1).rate_rps
        second = decode_capacity(decode, demand, workers=1, same_host=True).rate_rps
        return min(first, second) / (prefill.facts.gpus + decode.facts.gpus)

    pairs = [
        (per_gpu(a, b), a.cost.parallel.tp, b.cost.parallel.tp)
        for a in found.options
        for b in found.options
        if a.facts.gpus + b.facts.gpus <= 4
    ]
    rate_rps, prefill_tp, decode_tp = max(pairs)
    assert (prefill_tp, decode_tp) == (2, 1)
    assert rate_rps == pytest.approx(1.56, rel=0.2)


DYNAMO = {
    "llm": "llama3.1-70b", "weights": ["fp8"], "objective": "goodput-per-gpu",
    "hardware": [{"name": "H100-80G-SXM", "gpus": 8}],
    "slo": {"ttft_s": 3.0, "tpot_s": 0.05, "attainment_ratio": 0.5},
    "workload": {"input_tokens": 3000, "output_tokens": 150},
}  # fmt: skip


def dynamo(user_tokens_per_s: float) -> float:
    """How much more four prefill workers of one GPU and a decode worker of four give than the best mixed workers."""
    found = search(DYNAMO)
    slo = structs.replace(found.demand.slo, tpot_s=1 / user_tokens_per_s)
    demand: WorkloadDemand = replace(found.demand, slo=slo)
    by_tp = {option.cost.parallel.tp: option for option in found.options}
    mixed = max(8 / tp * mixed_capacity(option, demand, workers=8 // tp).rate_rps for tp, option in by_tp.items())
    prefill = 4 * prefill_capacity(by_tp[1], demand, workers=4).rate_rps
    decode = decode_capacity(by_tp[4], demand, workers=1, same_host=True).rate_rps
    return min(prefill, decode) / mixed


def test_dynamos_crossover_on_one_node() -> None:
    """Published: mixed workers are ahead below about 30 tokens/s for each user, separate ones above. Ours: 23 to 24.

    The gain at 50 tokens/s is published as 1.3; ours is larger, for our mixed workers pay for every prompt chunk.
    """
    assert dynamo(15) < 0.9
    assert dynamo(20) < 1.0
    assert dynamo(30) > 1.0
    assert dynamo(50) > 1.3


@pytest.mark.parametrize(("gpu", "published_bytes_per_s"), [("A800-80G-SXM", 6e9), ("H800-80G-SXM", 19e9)])
def test_mooncakes_break_even_bandwidth(gpu: str, published_bytes_per_s: float) -> None:
    found = search(
        {
            "llm": "llama3.1-70b", "tp": [8], "objective": "goodput-per-gpu", "hardware": [{"name": gpu, "gpus": 8}],
            "slo": {"ttft_s": 30.0, "tpot_s": 0.1}, "workload": {"input_tokens": 8192, "output_tokens": 200},
        }
    )  # fmt: skip
    advice = link_advice(found.options[0], found.demand, same_host=False)
    assert advice.peak_break_even_bytes_per_s == pytest.approx(published_bytes_per_s, rel=0.15)
    assert advice.break_even_bytes_per_s < advice.peak_break_even_bytes_per_s
