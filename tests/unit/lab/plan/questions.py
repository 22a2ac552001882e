"""Questions that planner tests ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.lab.plan.options import build_options
from baton.lab.plan.search import Search
from baton.lab.plan.spec import read_plan_input

WORKED: dict[str, Any] = {
    "llm": "opt-13b", "engine": "vllm-2023", "objective": "goodput-per-gpu",
    "hardware": [{"name": "A100-80G-SXM", "gpus": 4}],
    "slo": {"ttft_s": 0.4, "tpot_s": 0.04},
    "workload": {"input_tokens": 512, "output_tokens": 64},
}  # fmt: skip
"""DistServe's worked example."""


def search(raw: dict[str, Any], **more: Any) -> Search:
    """What `baton plan` would search with."""
    question = read_plan_input({**raw, **more}, Path())
    found, _ = build_options(question.choices, question.stocks, question.spec.wire)
    return Search(
        demand=question.demand, options=found, objective=question.spec.objective, same_host=question.same_host,
        pool_penalty_ratio=question.spec.pool_penalty_ratio, spare_workers=question.spec.spare_workers,
    )  # fmt: skip
