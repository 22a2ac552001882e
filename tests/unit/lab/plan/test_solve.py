"""The mixed-integer program against trying every count."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cli.plan import OBJECTIVES
from baton.core.types import Role
from baton.lab.plan.capacity import Capacity
from baton.lab.plan.options import WorkerOption
from baton.lab.plan.solve import LINK_RATIO, Pool, Problem, link_bytes_per_s, solve
from tests.unit.lab.plan.questions import WORKED, search

OPTIONS: dict[str, WorkerOption] = {option.name: option for option in search(WORKED).options}
NAMES = ["A100-80G-SXM tp1", "A100-80G-SXM tp2"]


def pool(role: Role, name: str, rate_rps: float, price: float) -> Pool:
    capacity = Capacity(rate_rps=rate_rps, step_tokens_max=512, requests=1, ttft_s=0, tpot_s=0, limit="")
    return Pool(role=role, option=OPTIONS[name], capacity=capacity, price=price)


pools = st.builds(
    pool, st.sampled_from(["prefill", "decode", "mixed"]), st.sampled_from(NAMES),
    st.floats(0.5, 9).map(lambda x: round(x, 1)), st.integers(1, 5).map(float),
)  # fmt: skip


def carried(problem: Problem, counts: tuple[int, ...]) -> float:
    """What these workers carry together: the scarcer of both sides, and mixed ones beside."""

    def side(role: Role) -> float:
        found = 0.0
        for count, each in zip(counts, problem.pools, strict=True):
            link_rps = LINK_RATIO * link_bytes_per_s(each.option) / problem.handoff_bytes
            rate_rps = each.capacity.rate_rps
            each_rps = rate_rps if problem.same_host or role == "mixed" else min(rate_rps, link_rps)
            found += count * each_rps if each.role == role else 0.0
        return found

    return min(side("prefill"), side("decode")) + side("mixed")


def affordable(problem: Problem) -> list[tuple[int, ...]]:
    gpus = [each.option.facts.gpus for each in problem.pools]
    every = product(*(range(4 // each + 1) for each in gpus))
    return [counts for counts in every if sum(n * g for n, g in zip(counts, gpus, strict=True)) <= 4]


def price(problem: Problem, counts: tuple[int, ...]) -> float:
    return sum(count * each.price for count, each in zip(counts, problem.pools, strict=True))


@settings(max_examples=40, deadline=None)
@given(found=st.lists(pools, min_size=1, max_size=4), same=st.booleans(), wanted=st.floats(0.5, 20))
def test_the_cheapest_fleet_is_as_cheap_as_the_best_of_all(found: list[Pool], same: bool, wanted: float) -> None:
    problem = Problem(pools=found, handoff_bytes=5e9, same_host=same, rate_rps=wanted, pools_max=4)
    solution, every = solve(problem), affordable(problem)
    most_rps = max(carried(problem, counts) for counts in every)
    if most_rps <= 1e-9:
        assert solution is None
        return
    assert solution is not None
    assert carried(problem, solution.counts) >= solution.rate_rps * (1 - 1e-3)
    if most_rps < wanted * 0.999:
        assert solution.rate_rps == pytest.approx(most_rps, rel=2e-3)
    elif most_rps > wanted * 1.001:
        enough = [price(problem, counts) for counts in every if carried(problem, counts) >= wanted - 1e-9]
        assert solution.price <= min(enough) * 1.002


@settings(max_examples=40, deadline=None)
@given(found=st.lists(pools, min_size=1, max_size=4), same=st.booleans())
def test_the_best_ratio_is_the_best_of_all(found: list[Pool], same: bool) -> None:
    problem = Problem(pools=found, handoff_bytes=5e9, same_host=same, rate_rps=None, pools_max=4)
    solution = solve(problem)
    ratios = [
        carried(problem, counts) / price(problem, counts) for counts in affordable(problem) if price(problem, counts)
    ]
    best = max(ratios, default=0.0)
    if best <= 1e-9:
        assert solution is None
    else:
        assert solution is not None
        assert solution.rate_rps / solution.price == pytest.approx(best, rel=3e-3)


def test_kv_of_another_format_does_not_flow() -> None:
    """fp8 KV into a bf16 decode worker would lose precision on the way: not without being asked."""
    prefill, decode = pool("prefill", NAMES[0], 5, 1), pool("decode", NAMES[0], 5, 1)
    other = replace(decode.option.cost, precision=type(decode.option.cost.precision)(kv="fp8"))
    odd = replace(decode, option=replace(decode.option, cost=other))
    problem = Problem(pools=[prefill, odd], handoff_bytes=1.0, same_host=True, rate_rps=None, pools_max=4)
    assert solve(problem) is None
    assert solve(replace(problem, pools=[prefill, decode])) is not None


def test_a_fleet_has_no_more_pools_than_allowed() -> None:
    """17 requests/s: one worker of each kind costs 3. With one pool, only 4 workers of tp 1 or 2 of tp 2 carry them."""
    both = [pool("mixed", NAMES[0], 5, 1), pool("mixed", NAMES[1], 12, 2)]
    problem = Problem(pools=both, handoff_bytes=1.0, same_host=True, rate_rps=17.0, pools_max=2)
    two, one = solve(problem), solve(replace(problem, pools_max=1))
    assert two is not None
    assert one is not None
    assert (two.counts, two.price) == ((1, 1), 3.0)
    assert (0 in one.counts, one.price) == (True, 4.0)


def test_nothing_to_choose_from() -> None:
    assert solve(Problem(pools=[], handoff_bytes=1.0, same_host=True, rate_rps=1.0, pools_max=4)) is None


def test_a_network_bounds_what_flows_between_pools() -> None:
    """25 GB/s, 80 % of it for handoffs, 50 GB each: 0.4 requests a second from a worker, whatever it computes."""
    both = [pool("prefill", NAMES[0], 5, 1), pool("decode", NAMES[0], 15, 1)]
    problem = Problem(pools=both, handoff_bytes=50e9, same_host=False, rate_rps=None, pools_max=4)
    slow, fast = solve(problem), solve(replace(problem, same_host=True))
    assert slow is not None
    assert fast is not None
    assert slow.rate_rps / min(slow.counts) == pytest.approx(0.4, rel=1e-3)
    assert fast.rate_rps == pytest.approx(15.0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_carries_the_wanted_rate_where_the_hardware_can(objective: str) -> None:
    """The best ratio alone would be one worker of the best kind, and most requests without an answer."""
    one = search(WORKED).fleet("mixed")
    assert one is not None
    wanted_rps = one.rate_rps / one.gpus * 2.5
    workload = {**WORKED["workload"], "rate_rps": wanted_rps}
    found = search(WORKED, objective=objective, workload=workload).fleet("mixed")
    assert found is not None
    assert found.rate_rps >= wanted_rps * (1 - 1e-3)
    assert found.gpus <= 4
