"""The planner believes the simulator, not its own formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.metrics.summary import Results
from baton.plan.admission import admission_words, play_admissions
from baton.plan.cluster import cluster_spec
from baton.plan.search import Fleet, Search
from baton.plan.verify import Span, sample_trace, simulate, span, verify
from tests.unit.plan.questions import WORKED, search


def test_a_fleet_that_promises_too_much_is_searched_for_again() -> None:
    """Told to trust 1.25 times what the screening says, the planner comes back to what holds in simulation."""
    bold = replace(search(WORKED, tp=[1]), derate=1.25)
    promised = bold.fleet("disaggregated")
    assert promised is not None
    missed = simulate(bold, promised, span(promised, bold.demand, requests=300), seed=1)
    assert (missed.slo.attainment_ratio or 0.0) < 0.9
    found = verify(bold, "disaggregated", requests=300, seed=1)
    assert found is not None
    assert found.derate < 1.25
    assert found.attainment_ratio >= 0.9
    assert found.fleet.rate_rps < promised.rate_rps


def test_a_short_look_spares_the_long_simulation_of_a_fleet_that_is_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spares time and nothing else: what is found has been played whole."""
    bold, played = replace(search(WORKED, tp=[1]), derate=1.25), list[int]()
    monkeypatch.setattr("baton.plan.verify.LOOK_REQUESTS", 200)

    def counted(search: Search, fleet: Fleet, judged: Span, **more: Any) -> Results:
        played.append(judged.requests)
        return simulate(search, fleet, judged, **more)

    monkeypatch.setattr("baton.plan.verify.simulate", counted)
    found = verify(bold, "disaggregated", requests=300, seed=1)
    assert found is not None
    assert found.attainment_ratio >= 0.9
    assert found.span.requests == played[-1] > 250
    assert played[0] < 250, "the first fleet was far off"
    assert played[1] < 250, "and was not played whole"


def test_above_its_rate_a_fleet_that_refuses_what_would_be_late_keeps_more_promises() -> None:
    """Half as much again as it carries: whoever takes all is late for nearly all."""
    found = search(WORKED, tp=[1])
    fleet = found.fleet("disaggregated")
    assert fleet is not None
    refusing, taking = play_admissions(found, fleet, ("all", "slo"), requests=300, seed=1)
    assert (refusing.admission, taking.admission) == ("slo", "all")
    assert refusing.overload_attainment_ratio > 0.5
    assert refusing.overload_attainment_ratio > taking.overload_attainment_ratio
    assert "with all" in admission_words([refusing, taking])[0]


def test_the_trace_of_a_simulation_is_the_demand() -> None:
    demand = search(WORKED).demand
    trace = sample_trace(replace(demand, cached_ratio=0.25), rate_rps=8.0, requests=2000, seed=3)
    assert {(request.input_tokens, request.output_tokens) for request in trace.requests} == {(384, 64)}
    assert trace.requests[-1].at_s == pytest.approx(2000 / 8.0, rel=0.1)
    assert trace == sample_trace(replace(demand, cached_ratio=0.25), rate_rps=8.0, requests=2000, seed=3)


def test_the_simulated_cluster_is_the_fleet() -> None:
    """Every worker with its own arena, its own cost model and its own batch limits; handoffs over the node's links."""
    found = search(WORKED, tp=[1, 2])
    fleet = found.fleet("disaggregated")
    assert isinstance(fleet, Fleet)
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
