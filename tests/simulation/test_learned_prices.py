"""The coordinator predicts with what each worker's own steps have shown, and a replay does too."""

from __future__ import annotations

import pytest

from baton.core.types import StepShape, WorkerView
from baton.decide.control.cluster_messages import WorkerSaid
from baton.decide.control.decision_log import replay
from baton.decide.cost.online import cost_of
from baton.lab.sim.cluster import SimCluster, fresh_cluster
from baton.lab.sim.faults import Slow
from tests.campaign.play import play
from tests.campaign.restless import play_policies
from tests.simulation.test_behaviour import COST, request, scenario

FACTOR = 3.0
DECODING = StepShape(decode_requests=4, context_tokens=80)


@pytest.fixture(scope="module")
def slowed() -> SimCluster:
    """Every request comes after the only worker has become three times as slow."""
    requests = [request(f"r{number}", output=20, at_s=1.0 + 0.1 * number) for number in range(6)]
    slow = Slow(worker=scenario(topology=(0, 0, 1)).cluster.views()[0].id, at_s=0.5, for_s=250.0, factor=FACTOR)
    return play(scenario(*requests, topology=(0, 0, 1), faults=[slow]))


def reported(played: SimCluster) -> list[WorkerView]:
    """Return the views that the coordinator was told, in order."""
    said = [turn.event for turn in played.server.journal.turns if isinstance(turn.event, WorkerSaid)]
    return [event.view for event in said if event.view is not None]


def test_the_coordinator_learns_the_speed_of_a_worker(slowed: SimCluster) -> None:
    view = reported(slowed)[-1]
    assert view.prices is not None
    assert view.prices.steps >= 30
    assert cost_of(view, COST).step_s(DECODING) == pytest.approx(FACTOR * COST.step_s(DECODING), rel=0.2)


def test_learned_prices_are_replayed(slowed: SimCluster) -> None:
    decisions = slowed.server.journal.turns
    fresh = fresh_cluster(slowed.spec, play_policies(slowed.spec, scenario().policy))
    assert replay(fresh, decisions) == (len(decisions), None)


def test_steps_that_take_as_long_as_predicted_teach_nothing() -> None:
    """So a simulation without slow workers gives the results of the given prices exactly."""
    played = play(scenario(request("a"), request("b", at_s=0.1)))
    assert {view.prices for view in reported(played)} == {None}
