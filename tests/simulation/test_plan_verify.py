"""The planner believes the simulator, not its own formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from baton.lab.plan.admission import describe_admission, play_admissions
from baton.lab.plan.cluster import BLOCK_TOKENS, cluster_spec
from baton.lab.plan.demand import LengthClass, strata
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.play import FleetResults, FleetSimulator, PlayLength, describe_results, sample_trace
from baton.lab.plan.search import Search
from baton.lab.plan.verify import DERATING_STEP, DERATINGS, HEADROOM, VerifiedFleet, verify
from baton.lab.report.summary import RequestRecord, SloTargets, summarize
from baton.lab.sim.cells import CellJob
from baton.lab.sim.replay_trace import play_cell
from tests.unit.lab.plan.questions import WORKED, search


@pytest.fixture(autouse=True)
def short_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a part of the usual requests."""
    monkeypatch.setattr("baton.lab.plan.play.PLAYED_MAX", 2_000)
    monkeypatch.setattr("baton.lab.plan.admission.PLAYED_MAX", 400)


def simulator(found: Search, *, requests: int = 300, seed: int = 1) -> FleetSimulator:
    return FleetSimulator(search=found, requests=requests, seed=seed, promised=False)


def bold(**more: Any) -> Search:
    """Told to trust 1.25 times what the screening says."""
    return replace(search(WORKED, tp=[1], **more), derate=1.25)


def test_a_fleet_that_promises_too_much_is_searched_for_again() -> None:
    """It comes back to what holds in simulation, and to no less than it has to."""
    found = bold()
    promised = found.fleet("disaggregated")
    assert promised is not None
    assert simulator(found).play(promised, load=HEADROOM, wanted_ratio=0.9) is None
    held = verify(found, "disaggregated", simulator(found))
    assert held is not None
    assert held.holds
    assert held.played is not None
    assert held.played.attainment_ratio >= 0.9
    assert held.fleet.rate_rps < promised.rate_rps
    trusted = replace(found, derate=held.derate / DERATING_STEP).fleet("disaggregated")
    assert trusted is not None
    assert simulator(found).play(trusted, load=HEADROOM, wanted_ratio=0.9) is None, "with one step more it misses"


def test_a_play_ends_when_too_many_are_late_and_says_what_the_whole_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found, closed = bold(), list[int]()

    def counted(job: CellJob, *, enough: Callable[[RequestRecord], bool]) -> list[RequestRecord]:
        records = play_cell(job, enough=enough)
        closed.append(len(records))
        return records

    monkeypatch.setattr("baton.lab.plan.play.play_cell", counted)
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    whole = simulator(found).play(fleet, load=1.0, requests_max=250)
    assert whole is not None
    judged, of_whole = whole.length, sum(closed)
    assert whole.attainment_ratio < 0.9
    assert whole.results.requests == judged.sequences * judged.judged
    closed.clear()
    assert simulator(found).play(fleet, load=1.0, wanted_ratio=0.9, requests_max=250) is None
    assert sum(closed) < 0.7 * of_whole
    just = simulator(found).play(fleet, load=1.0, wanted_ratio=whole.attainment_ratio, requests_max=250)
    assert just == whole, "as many as are wanted meet it, and not one more"
    more_ratio = whole.attainment_ratio + 1e-4
    assert simulator(found).play(fleet, load=1.0, wanted_ratio=more_ratio, requests_max=250) is None


def test_sequences_of_arrivals_differ_and_are_judged_together() -> None:
    """As if they had come one after the other: a rate is not counted three times."""
    found = search(WORKED, tp=[1])
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    played = simulator(found).play(fleet, load=1.0)
    assert played is not None
    assert len(played.ratios) == played.length.sequences == 3
    assert len(set(played.ratios)) > 1
    assert played.attainment_ratio == pytest.approx(sum(played.ratios) / 3)
    assert played.results.requests_per_s == pytest.approx(fleet.rate_rps, rel=0.2)
    low, high = min(played.ratios), max(played.ratios)
    assert f"{low:.1%} to {high:.1%} of each met the SLO" in describe_results(fleet, played, found.demand)


def test_the_same_fleet_at_the_same_rate_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is asked for is carried by whole workers: less trust often leaves the same ones."""
    found = search(WORKED, tp=[1], workload={**WORKED["workload"], "rate_rps": 3})
    fleet, once = found.fleet("mixed"), simulator(found)
    assert fleet is not None
    first = once.play(fleet, load=1.0)
    monkeypatch.setattr("baton.lab.plan.play.play_cell", None)
    assert once.play(fleet, load=1.0) is first
    with pytest.raises(TypeError):
        once.play(fleet, load=1.1)


@pytest.mark.parametrize("attained_ratio", [0.5, 1.0])
@pytest.mark.parametrize(
    ("headroom", "missed"), [(1.02, 1.0), (1.07, 1 / HEADROOM), (1.18, DERATINGS[2]), (1.25, DERATINGS[4])]
)
def test_a_fleet_with_spares_is_verified_where_the_stock_has_no_larger_one(
    headroom: float, missed: float, attained_ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a stock without a fleet for 1.05 times the rate led to no simulation, and one that ended early to none
    of the smaller steps, so the plan recommended a fleet that no simulation had judged."""
    spared = {**WORKED, "spare_workers": 1, "tp": [1], "workload": {**WORKED["workload"], "rate_rps": 1.0}}
    few = search(spared)
    most_rps = 3 * few.capacity("mixed", few.options[0], 3).rate_rps
    found = search(spared, workload={**WORKED["workload"], "rate_rps": most_rps / headroom})

    def play(self: FleetSimulator, fleet: PlannedFleet, *, load: float, wanted_ratio: float = 0.0) -> object:
        results = summarize([], slo=SloTargets(), wall_s=0.0)
        results = structs.replace(results, slo=structs.replace(results.slo, attainment_ratio=attained_ratio))
        played = FleetResults(length=PlayLength(1, 1, 1), results=results, ratios=(attained_ratio,))
        return played if attained_ratio >= wanted_ratio else None

    monkeypatch.setattr(FleetSimulator, "play", play)
    verified = verify(found, "mixed", simulator(found))
    assert verified is not None
    assert verified.played is not None
    assert verified.holds is (attained_ratio == 1.0)
    assert verified.derate == (max(missed, 1 / HEADROOM) if verified.holds else missed)


def test_a_shape_that_cannot_be_ahead_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gives as much as the screening says of mixed workers leaves nothing to play."""
    found = search(WORKED, tp=[1])
    fleet = found.fleet("mixed")
    assert fleet is not None
    monkeypatch.setattr("baton.lab.plan.play.play_cell", None)
    behind = verify(found, "mixed", simulator(found), beat=(0.0, fleet.value("goodput-per-gpu")))
    assert behind is not None
    assert (behind.fleet.name, behind.played, behind.holds) == (fleet.name, None, False)
    assert behind.fleet.rate_rps == pytest.approx(fleet.rate_rps / HEADROOM), "so much it would promise at most"


def test_above_its_rate_a_fleet_that_refuses_what_would_be_late_keeps_more_promises() -> None:
    """Half as much again as it carries: whoever takes all is late for nearly all."""
    found = search(WORKED, tp=[1])
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    chosen = VerifiedFleet(fleet=fleet, derate=1.0, played=None, holds=False)
    refusing, taking = play_admissions(simulator(found), chosen, ("all", "slo"))
    assert (refusing.admission, taking.admission) == ("slo", "all")
    assert refusing.overload_attainment_ratio > 0.5
    assert refusing.overload_attainment_ratio > taking.overload_attainment_ratio
    assert "with all" in describe_admission([refusing, taking])[0]


def test_the_trace_of_a_simulation_is_the_demand() -> None:
    demand = replace(search(WORKED).demand, cached_ratio=0.25)
    trace = sample_trace(demand, demand.lengths, rate_rps=8.0, requests=2000, seed=3)
    assert {(request.input_tokens, request.output_tokens) for request in trace.requests} == {(512, 64)}
    assert {request.prefix_ids for request in trace.requests} == {tuple(range(512 // 4 // BLOCK_TOKENS))}
    assert len({id(request.prefix_ids) for request in trace.requests}) == 1, "thousands of ids, in memory once"
    assert trace.requests[-1].at_s == pytest.approx(2000 / 8.0, rel=0.1)
    assert trace == sample_trace(demand, demand.lengths, rate_rps=8.0, requests=2000, seed=3)


def test_hits_are_simulated_with_their_context() -> None:
    """Before, the cached part of a prompt was left out, and with it the attention to it."""
    found = search(WORKED, tp=[1], workload={**WORKED["workload"], "cached_ratio": 0.75})
    fleet = found.fleet("mixed")
    assert fleet is not None
    played = simulator(found).play(fleet, load=1.0, requests_max=250)
    assert played is not None
    assert played.results.prefix_hit_ratio == 0.75
    assert played.results.input_tokens_per_s == pytest.approx(512 * (played.results.requests_per_s or 0.0))


def test_requests_of_a_trace_are_played_as_they_were_and_not_as_the_mean_of_their_class() -> None:
    """Prompts of about one length with answers of 2 and 200 tokens: to the screening, answers of 101."""
    pairs = [(500 + more, output_tokens) for more in range(24) for output_tokens in (2, 200)]
    drawn = tuple(LengthClass(*pair, 1.0) for pair in pairs)
    demand = replace(search(WORKED).demand, lengths=strata(pairs))
    assert {each.output_tokens for each in demand.lengths} == {101}
    trace = sample_trace(demand, drawn, rate_rps=8.0, requests=200, seed=3)
    assert {request.output_tokens for request in trace.requests} == {2, 200}
    found = replace(search(WORKED, tp=[1]), demand=demand)
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    played = replace(simulator(found), drawn=drawn).play(fleet, load=1.0, requests_max=250)
    assert played is not None
    assert played != simulator(found).play(fleet, load=1.0, requests_max=250)


def test_the_simulated_cluster_is_the_fleet() -> None:
    """Every worker with its own arena, its own cost model and its own batch limits; handoffs over the node's links."""
    found = search(WORKED, tp=[1, 2])
    fleet = found.fleet("disaggregated")
    assert isinstance(fleet, PlannedFleet)
    spec = cluster_spec(fleet, same_host=True)
    assert spec.problems() == []
    roles = [view.role for view in spec.views()]
    assert (roles.count("prefill"), roles.count("decode")) == (2, 1)
    assert len(spec.hosts()) == 3
    cost = spec.cost_model()
    for group in fleet.groups:
        view = next(view for view in spec.views() if view.role == group.role)
        assert cost.on(view.kind).prefill_s(new_tokens=512, cached_tokens=0) == group.option.cost.prefill_s(
            new_tokens=512, cached_tokens=0
        )
        assert spec.kv_of(view.host).blocks * 16 == pytest.approx(group.option.facts.kv_tokens_max, abs=16)
        assert spec.batch_of(view.kind).step_tokens_max >= group.capacity.step_tokens_max
