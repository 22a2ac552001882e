"""Context parallelism: a long prompt over several GPUs, priced with what they tell each other, and searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from baton.core.types import StepShape
from baton.lab.plan.options import WorkerOption
from tests.unit.lab.plan.questions import search

LONG: dict[str, Any] = {
    "llm": "llama3.1-8b", "objective": "goodput-per-gpu", "tp": [1], "cp": [1, 8], "shape": "disaggregated",
    "hardware": [{"name": "H100-80G-SXM", "gpus": 16}],
    "slo": {"ttft_s": 3.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 120_000, "output_tokens": 200},
}  # fmt: skip


def option(name: str) -> WorkerOption:
    return next(each for each in search(LONG).options if each.name == f"H100-80G-SXM {name}")


def test_a_promise_that_one_gpu_cannot_keep_is_kept_by_eight_that_share_the_prompt() -> None:
    """A GPU takes three times as long as it may; tensor parallelism is not offered here."""
    assert option("tp1").cost.prefill_s(new_tokens=120_000, cached_tokens=0) > LONG["slo"]["ttft_s"]
    assert search(LONG, cp=[1]).fleet("disaggregated") is None
    fleet = search(LONG).fleet("disaggregated")
    assert fleet is not None
    assert {group.option.cost.parallel.cp for group in fleet.having("prefill")} == {8}


def test_parts_share_arithmetic_and_kv_but_not_weights() -> None:
    one, eight = option("tp1"), option("cp8")
    assert eight.facts.kv_tokens_max == 8 * one.facts.kv_tokens_max
    alone = StepShape(decode_requests=1, context_tokens=1)
    assert eight.cost.step_s(alone) > one.cost.step_s(alone), "all read the whole weights, and then agree"


def test_the_ring_is_hidden_under_a_long_prompt_and_felt_by_a_short_one_on_a_slow_link() -> None:
    cost = option("cp8").cost
    slow = replace(cost, hardware=structs.replace(cost.hardware, intra_node_bytes_per_s=1e10))
    hidden, felt = (
        slow.prefill_s(new_tokens=tokens, cached_tokens=0) / cost.prefill_s(new_tokens=tokens, cached_tokens=0)
        for tokens in (1_000_000, 8_000)
    )
    assert felt > 2 > 1.5 > hidden


def test_a_node_bounds_the_parts_of_a_worker() -> None:
    cuts = {(each.cost.parallel.tp, each.cost.parallel.cp) for each in search(LONG, tp=[1, 4], cp=[1, 2, 8]).options}
    assert cuts == {(1, 1), (1, 2), (1, 8), (4, 1), (4, 2)}
