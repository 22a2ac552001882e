"""Experts on GPUs: the planner tries no more GPUs for them than there are experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.lab.plan.options import build_options
from baton.lab.plan.spec import read_plan_input

QUESTION: dict[str, Any] = {
    "llm": "mixtral-8x7b", "objective": "goodput-per-gpu", "tp": [1, 8], "cp": [1, 2], "shape": "disaggregated",
    "hardware": [{"name": "H100-80G-SXM", "gpus": 160}, {"name": "A100-80G-SXM", "gpus": 16}],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 1000, "output_tokens": 200},
}  # fmt: skip


def test_no_worker_has_more_gpus_for_experts_than_there_are_experts() -> None:
    """Mixtral has eight. 160 GPUs have room for 144 that share them, each with a fraction of one."""
    question = read_plan_input(QUESTION, Path())
    found, out = build_options(question.choices, question.stocks, question.spec.wire)
    degrees = {(each.cost.parallel.dp, each.cost.parallel.ep) for each in found}
    assert (8, 8) in degrees
    assert max(ep for _, ep in degrees) == 8
    assert not [line for line in out if "ep" in line.split()], "nobody asked for what is not tried"
