"""Room for failures and for growth: what the planner adds to a fleet, and when the next purchase is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.lab.plan.growth import day_steps, describe_day, describe_growth, growth_steps
from baton.lab.plan.page import plan_page
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.recommend import recommend, screen
from baton.lab.plan.search import Search
from baton.lab.plan.spec import read_plan_input

QUESTION: dict[str, Any] = {
    "llm": "llama3.1-8b", "tp": [1], "finalists": 0, "objective": "cheapest",
    "hardware": [{"name": "H100", "gpus": 12, "usd_per_hour": 4.0}],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 1024, "output_tokens": 128, "rate_rps": 30.0},
}  # fmt: skip
SPOT = [{"name": "H100", "gpus": 12, "usd_per_hour": 4.0, "lost_ratio": 0.4}]


def screened(**more: Any) -> tuple[Search, PlannedFleet]:
    found = screen(read_plan_input({**QUESTION, **more}, Path()))
    return found.search, found.best


@pytest.mark.parametrize("shape", ["mixed", "disaggregated"])
@pytest.mark.parametrize("spare_workers", [0, 1, 2])
def test_a_fleet_carries_the_rate_after_the_loss_of_its_spare_workers(shape: str, spare_workers: int) -> None:
    _, plain = screened(shape=shape)
    _, best = screened(shape=shape, spare_workers=spare_workers)
    assert [group.spare_workers for group in best.groups] == [spare_workers] * len(best.groups)
    assert best.without_spares().name == plain.name, "no worker more than the loss takes"
    assert best.capacity_rps >= 30.0


def test_the_failure_of_a_host_leaves_enough_workers() -> None:
    """12 GPUs are on two hosts. Half of an evenly spread pool is lost with one of them."""
    _, plain = screened(shape="mixed")
    _, best = screened(shape="mixed", spare_hosts=1)
    (group,), (needed,) = best.groups, plain.groups
    assert group.spare_workers == -(-group.workers // 2)
    assert group.workers - group.spare_workers == needed.workers
    with pytest.raises(ConfigError, match="not after the loss of spare_workers, spare_hosts and lost_ratio"):
        screened(shape="mixed", spare_hosts=2)


def test_spot_workers_are_added_for_the_share_that_may_be_lost() -> None:
    _, best = screened(shape="mixed", hardware=SPOT)
    (group,) = best.groups
    left = group.workers - group.spare_workers
    assert group.spare_workers >= 0.4 * group.workers
    assert group.spare_workers - 1 < 0.4 * (group.workers - 1) or left * group.capacity.rate_rps >= 30.0
    assert best.usd_per_hour == pytest.approx(4.0 * group.workers)


def test_a_stock_that_carries_the_rate_only_without_losses_is_refused() -> None:
    few = [{"name": "H100", "gpus": 2, "usd_per_hour": 4.0}]
    with pytest.raises(
        ConfigError, match="not after the loss of spare_workers, spare_hosts and lost_ratio: give more GPUs"
    ):
        screened(hardware=few, spare_workers=2, shape="mixed")


def test_a_reserve_and_growth_need_a_rate() -> None:
    workload = {"input_tokens": 1024, "output_tokens": 128}
    with pytest.raises(ConfigError, match="spare_workers, spare_hosts, lost_ratio and growth_ratio need a rate"):
        screened(objective="goodput-per-dollar", workload=workload, spare_workers=1)


def test_the_next_purchase_is_due_when_the_load_exceeds_the_capacity() -> None:
    search, best = screened(shape="mixed")
    steps = growth_steps(search, best, 0.2)
    assert steps[0].fleet == best.name
    months = next(month for month in range(99) if 30.0 * 1.2**month > best.capacity_rps)
    assert (steps[1].at, steps[1].gpus) == (months, best.gpus + 1)
    assert [step.price for step in steps] == sorted(step.price for step in steps)
    (text,) = describe_growth(search, steps, 0.2)
    assert f"suffices for {months} month" in text
    assert "the next purchase is 1 GPU for 4 USD/h" in text
    assert growth_steps(search, best, 0.0) == []


def test_the_fleet_is_planned_for_the_busiest_hour_and_told_for_each_one() -> None:
    rates_rps = [2.0] * 12 + [30.0] * 12
    workload = {"input_tokens": 1024, "output_tokens": 128, "day_rates_rps": rates_rps}
    search, best = screened(shape="mixed", workload=workload)
    assert search.demand.rate_rps == 30.0
    steps = day_steps(search, best, rates_rps)
    assert [step.gpus for step in steps] == [1] * 12 + [best.gpus] * 12
    assert "least at 00:00" in describe_day(search, steps)[0]
    assert "most at 12:00" in describe_day(search, steps)[0]
    with pytest.raises(ConfigError, match="rate_rps and workload"):
        screened(workload={**workload, "rate_rps": 1.0})


def test_the_page_draws_each_pool_with_its_spare_workers() -> None:
    found = recommend(read_plan_input({**QUESTION, "shape": "disaggregated", "spare_workers": 1}, Path()))
    page = plan_page(found)
    for group in found.best.groups:
        assert f"{group.workers} x {group.role}, 1 of them spare" in page
    assert page.count("KV →") == 1
    assert "after the loss of 1 of" in found.verdict[1]
    assert found.verdict[0] in page.replace("&lt;", "<")
