"""`baton replay --policy`: whatever a policy decides and a log holds is asked of the other policies too."""

from __future__ import annotations

from typing import get_args

import pytest
from msgspec.structs import replace

from baton.lab.report.choices import Decided
from baton.lab.report.compare import Comparison, compare
from baton.lab.sim.cluster import SimCluster, cluster_coordinator
from baton.lab.sim.faults import HostKill
from baton.lab.sim.play import play
from baton.lab.sim.restless import play_policies
from baton.lab.sim.scenario import RESTLESS_FLEET
from tests.simulation.test_behaviour import request
from tests.simulation.test_central import by_pool
from tests.simulation.test_hosts import A, B

NINE = [request(f"r{place}", tokens=120, output=40, at_s=place * 0.3) for place in range(9)]


@pytest.fixture(scope="module")
def played() -> SimCluster:
    """Nothing stays where it is, and for a second nobody is there."""
    down = tuple(HostKill(host=host, at_s=0.7, notice_s=0.0, restart_s=1.0) for host in (A, B))
    made = by_pool(*NINE, faults=down, policy=RESTLESS_FLEET)
    return play(replace(made, cluster=replace(made.cluster, layers=4, tick_s=0.25)))


def compared(played: SimCluster, policy: str) -> Comparison:
    own, other = (play_policies(played.spec, name) for name in (RESTLESS_FLEET, policy))
    return compare(cluster_coordinator(played.spec, own), played.server.journal.decisions(), other.cluster)


def test_every_kind_of_decision_is_asked_and_the_same_policies_answer_the_same(played: SimCluster) -> None:
    found = compared(played, RESTLESS_FLEET)
    assert [subject for subject in get_args(Decided) if not found.asked[subject]] == []
    assert (found.differing, found.disagreements) == ({}, 0)
    assert found.ticks > 0


def test_others_differ_in_every_kind_and_are_not_followed(played: SimCluster) -> None:
    """Those of Splitwise send nothing ahead, go from host to host, and leave the fleet as it is."""
    found = compared(played, "splitwise")
    assert found.disagreements == 0
    assert {"decode", "first_token", "streaming", "layers", "way", "roles", "scaling", "moves"} <= set(found.differing)
    answers = {subject: {d.other for d in found.divergences if d.subject == subject} for subject in found.differing}
    assert answers["first_token"] == {"prefill"}
    assert answers["streaming"] == {"when it is computed"}
    assert answers["layers"] == {"1"}
    assert answers["way"] == {"direct"}
    assert (answers["roles"], answers["scaling"]) == ({"nobody flips"}, {"as many as there are"})
    assert answers["moves"] == {"nobody moves"}


def test_both_ways_have_their_prediction(played: SimCluster) -> None:
    ways = [divergence for divergence in compared(played, "direct").divergences if divergence.subject == "way"]
    assert ways
    assert {(way.recorded, way.other) for way in ways} == {("central", "direct")}
    assert all(way.recorded_s and way.other_s for way in ways)
