"""What binds a worker, in words that fit the shares of the peaks beside them."""

from __future__ import annotations

import pytest

from baton.plan.reasons import reasons
from tests.unit.plan.questions import search


@pytest.mark.parametrize(
    ("llm", "tp", "bound"),
    [
        ("smollm2-135m", 1, "is bound by overhead:"),
        ("qwen3-0.6b", 2, "is bound by overhead and exchange between GPUs:"),
        ("llama3.1-8b", 1, "is bound by memory bandwidth:"),
    ],
)
def test_a_step_that_uses_little_of_either_peak_is_bound_by_neither(llm: str, tp: int, bound: str) -> None:
    found = search(
        {
            "llm": llm, "tp": [tp], "objective": "goodput-per-gpu", "hardware": [{"name": "H100", "gpus": 2 * tp}],
            "slo": {"ttft_s": 1.0, "tpot_s": 0.03}, "workload": {"input_tokens": 20, "output_tokens": 20},
        }
    )  # fmt: skip
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    decode = next(line for line in reasons(fleet, found.demand) if line.startswith("decode"))
    assert bound in decode
