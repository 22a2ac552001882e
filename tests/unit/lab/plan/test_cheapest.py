"""The recommended fleet is the cheapest one that carries the asked rate."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton.core.types import Role
from baton.lab.plan.candidates import cost_points, list_candidates
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.planned_fleet import PlannedFleet, WorkerGroup, carried_rps, gpus_text
from baton.lab.plan.recommend import Recommendation, recommend
from baton.lab.plan.search import Search
from baton.lab.plan.spec import read_plan_input
from tests.unit.lab.plan.questions import WORKED, search

OVERSIZED: dict[str, Any] = {
    "llm": "llama3.1-8b", "tp": [1, 2], "requests": 100, "admission": ["all"],
    "hardware": [{"name": "h100-sxm", "gpus": 4}],
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
    "workload": {"input_tokens": 1024, "output_tokens": 128, "rate_rps": 10.0},
}  # fmt: skip
"""One mixed GPU carries about 20 req/s."""
TWO_KINDS = [{"name": "H100", "gpus": 4, "usd_per_hour": 4.8}, {"name": "A100", "gpus": 4, "usd_per_hour": 1.8}]
ONE_KIND = [{"name": "H100", "gpus": 6, "usd_per_hour": 4.8}]
LENGTHS = ((1024, 128), (300, 300))
QUICK_GRID = [(ONE_KIND, LENGTHS[0], 30.0, "cheapest", 0.05), (TWO_KINDS, LENGTHS[0], 12.0, "cheapest", 0.05)]
DEEP_GRID = list(
    product([ONE_KIND, TWO_KINDS], LENGTHS, [0.5, 2.0, 8.0, 20.0, 60.0], ["cheapest", "goodput-per-gpu"], [0.0, 0.05])
)


def question(
    hardware: list[dict[str, Any]], lengths: tuple[int, int], rate_rps: float, objective: str, penalty: float
) -> dict[str, Any]:
    input_tokens, output_tokens = lengths
    return {
        "llm": "llama3.1-8b", "tp": [1, 2], "hardware": hardware, "objective": objective, "finalists": 0,
        "slo": {"ttft_s": 0.5, "tpot_s": 0.03}, "pool_penalty_ratio": penalty,
        "workload": {"input_tokens": input_tokens, "output_tokens": output_tokens, "rate_rps": rate_rps},
    }  # fmt: skip


def groups_of(found: Search, role: Role) -> Iterator[WorkerGroup]:
    """Yield every group of one option in this role that the stock allows."""
    for option in found.options:
        for workers in range(1, option.stock.gpus // option.facts.gpus + 1):
            capacity = found.capacity(role, option, workers)
            yield WorkerGroup(role=role, option=option, workers=workers, capacity=capacity)


def is_in_stock(groups: tuple[WorkerGroup, ...]) -> bool:
    stocks = {group.option.stock.name: group.option.stock.gpus for group in groups}
    used = {
        name: sum(group.workers * group.option.facts.gpus for group in groups if group.option.stock.name == name)
        for name in stocks
    }
    return all(used[name] <= gpus for name, gpus in stocks.items())


def every_fleet(found: Search) -> Iterator[PlannedFleet]:
    """Yield every fleet with one pool per role that carries the asked rate, found by trying all of them."""
    choices = [(group,) for group in groups_of(found, "mixed")]
    choices += list(product(groups_of(found, "prefill"), groups_of(found, "decode")))
    asked_rps = found.demand.rate_rps
    for groups in choices:
        capacity_rps = carried_rps(groups, handoff_bytes=0.0, same_host=True)
        if is_in_stock(groups) and capacity_rps >= (asked_rps or 1e-9):
            yield PlannedFleet(groups=groups, rate_rps=asked_rps or capacity_rps, capacity_rps=capacity_rps)


def check_cheapest(raw: dict[str, Any]) -> None:
    """Compare the best fleet with every listed candidate, with the cost curve, and with all small fleets."""
    found = search(raw, reach="node")
    best, asked_rps = found.fleet("best"), found.demand.rate_rps
    assert best is not None
    assert asked_rps is not None
    tried = [found.penalized_price(fleet) for fleet in every_fleet(found)]
    if best.rate_rps < asked_rps:
        assert not tried
        return
    price = found.penalized_price(best)
    assert best.capacity_rps >= asked_rps
    assert price <= min(tried, default=price) * (1 + 1e-9)
    listed = [candidate for candidate, _ in list_candidates(found, best, {})]
    assert listed[0].fleet == best.name
    assert all(each.penalized_price >= price * (1 - 1e-9) for each in listed if each.verdict != "short")
    here = [point for point in cost_points(found, best, {}) if point.rate_rps == asked_rps]
    assert any(point.fleet == best.name for point in here), "the chart shows the recommended fleet"


@pytest.mark.parametrize("asked", QUICK_GRID)
def test_no_fleet_that_carries_the_rate_is_cheaper(asked: tuple[Any, ...]) -> None:
    check_cheapest(question(*asked))


@pytest.mark.deep
@pytest.mark.parametrize("asked", DEEP_GRID)
def test_no_fleet_that_carries_the_rate_is_cheaper_on_a_larger_grid(asked: tuple[Any, ...]) -> None:
    check_cheapest(question(*asked))


@pytest.mark.parametrize("hardware", [ONE_KIND, TWO_KINDS])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_without_a_rate_no_fleet_has_a_better_rate_for_its_price(
    hardware: list[dict[str, Any]], lengths: tuple[int, int]
) -> None:
    """More pools are recommended only if they are better by their penalty."""
    raw = question(hardware, lengths, 1.0, "goodput-per-dollar", 0.05)
    del raw["workload"]["rate_rps"]
    found = search(raw, reach="node")
    best = found.fleet("best")
    assert best is not None
    ratio = best.rate_rps / found.penalized_price(best)
    tried = [fleet.rate_rps / found.penalized_price(fleet) for fleet in every_fleet(found)]
    assert ratio >= max(tried) * (1 - 1e-9)
    assert ratio >= best.value("goodput-per-dollar") / (1 + 0.05 * best.extra_pools) * (1 - 1e-9)
    worth = [found.worth(fleet) for _, fleet in list_candidates(found, best, {})]
    assert worth[0] == max(worth)


def test_one_finalist_is_the_best_fleet_of_all_shapes() -> None:
    """With one finalist, separate workers alone were simulated, and recommended at twice the price."""
    found = recommend(read_plan_input({**OVERSIZED, "finalists": 1}, Path()))
    assert list(found.verified) == ["mixed"]
    assert found.best.gpus == 1


@pytest.fixture(scope="module")
def oversized() -> Recommendation:
    return recommend(read_plan_input(OVERSIZED, Path()))


def test_one_gpu_is_recommended_where_one_suffices(oversized: Recommendation) -> None:
    assert oversized.best.gpus == 1
    assert oversized.best.rate_rps == pytest.approx(10.0)
    assert oversized.best.capacity_rps > 15
    assert not oversized.short
    purchase, headroom, simulated, next_best = oversized.verdict
    assert purchase.startswith("do not disaggregate: use 1 x H100-80G-SXM (4.76 USD/h): 1 mixed worker of ")
    assert "it carries the asked 10 req/s" in headroom
    assert f"its headroom is {oversized.best.spare_ratio:.0%}" in headroom
    assert "requests met the SLO" in simulated
    assert next_best.startswith("the next best is ")
    assert "x the price of the recommended fleet" in next_best


def test_a_simulated_candidate_that_meets_the_slo_is_not_cheaper(oversized: Recommendation) -> None:
    held = [each for each in oversized.verified.values() if each.holds]
    assert held
    price = oversized.best.price("cheapest")
    assert all(each.fleet.price("cheapest") >= price for each in held)


def test_more_pools_must_save_their_penalty() -> None:
    """One H100 carries 80 % of the rate. A cheap A100 beside it is an extra pool, a second H100 is not."""
    hardware = [{"name": "H100", "gpus": 4, "usd_per_hour": 4.0}, {"name": "A100", "gpus": 4, "usd_per_hour": 3.9}]
    one = search({**OVERSIZED, "hardware": hardware, "tp": [1]})
    h100 = next(option for option in one.options if option.stock.hardware.name.startswith("H100"))
    rate_rps = 1.25 * one.capacity("mixed", h100, 1).rate_rps
    workload = {**OVERSIZED["workload"], "rate_rps": rate_rps}
    asked = {**OVERSIZED, "hardware": hardware, "tp": [1], "objective": "cheapest", "workload": workload}
    few = search(asked).fleet("mixed")
    assert few is not None
    assert few.extra_pools == 0
    free = recommend(read_plan_input({**asked, "shape": "mixed", "finalists": 0, "pool_penalty_ratio": 0.0}, Path()))
    assert free.best.extra_pools == 1
    assert free.best.usd_per_hour < few.usd_per_hour


def test_a_group_that_the_network_limits_carries_no_more_than_the_network() -> None:
    option: WorkerOption = search(WORKED, tp=[1]).options[0]
    found = search(WORKED, tp=[1])
    groups = [
        WorkerGroup(role=role, option=option, workers=1, capacity=found.capacity(role, option, 1))
        for role in ("prefill", "decode")
    ]
    here = carried_rps(groups, handoff_bytes=50e9, same_host=True)
    there = carried_rps(groups, handoff_bytes=50e9, same_host=False)
    assert there == pytest.approx(0.4, rel=1e-3)
    assert there < here


def test_numbers_of_gpus_are_spelled_right() -> None:
    assert (gpus_text(1), gpus_text(2)) == ("1 GPU", "2 GPUs")
