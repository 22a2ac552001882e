"""The capacity of mixed workers, whose steps hold prompt chunks and decodes."""

from __future__ import annotations

from typing import Any

from baton.core.types import StepShape, prefill_pairs
from baton.lab.plan.capacity import _both_s, mixed_capacity, prompt_s
from tests.unit.lab.plan.questions import search

ONE_GPU: dict[str, Any] = {
    "llm": "llama3.1-8b", "tp": [1], "objective": "goodput-per-gpu", "hardware": [{"name": "H100", "gpus": 1}],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05}, "workload": {"input_tokens": 32, "output_tokens": 8},
}  # fmt: skip


def test_short_prompts_that_share_steps_are_not_limited_by_the_time_of_one_alone() -> None:
    """Before, no rate above two prompts in the time of one alone was tried: 250 req/s instead of 770."""
    found = search(ONE_GPU)
    capacity = mixed_capacity(found.options[0], found.demand, workers=1)
    alone_s = prompt_s(found.options[0].cost, new=32, cached=0, step_tokens=capacity.step_tokens_max)
    assert capacity.rate_rps > 4 / alone_s
    assert capacity.limit == "requests at once"


def test_a_chunk_of_a_prompt_with_hits_comes_after_all_of_the_cached_tokens() -> None:
    """36,000 of 40,000 tokens are cached, and chunks of 1,000 compute the others: 37,500 precede a mean chunk."""
    found = search(ONE_GPU, workload={"input_tokens": 40_000, "output_tokens": 8, "cached_ratio": 0.9})
    cost = found.options[0].cost
    pairs = prefill_pairs(1000, 36_000 + (4000 - 1000) // 2)
    step_s = cost.step_s(StepShape(prefill_tokens=1000, prefill_chunks=1, prefill_pairs=pairs))
    assert _both_s(cost, found.demand, 0.0, 1000.0) == step_s
