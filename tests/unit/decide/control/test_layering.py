"""News of layers that come late, or of an attempt that was given up, begins nothing and completes nothing."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.copies import LandingEnded, LayersDone
from baton.core.messages import PrefillFinished
from baton.core.types import RequestId, WorkerId
from baton.decide.control.cluster_messages import WorkerSaid
from baton.lab.sim.cluster import SimCluster
from tests.campaign.play import Play, prepare_play
from tests.simulation.test_ahead import pool_decisions
from tests.simulation.test_hosts import B
from tests.simulation.test_layers import layered

R, PREFILL = RequestId("r"), WorkerId("prefill-0")


def in_the_step() -> Play:
    """Played until layers of the only chunk are under way."""
    playing = prepare_play(layered())
    playing.cluster.loop.run(until_s=0.2, events_max=10_000, after_each=playing.watch.after_event)
    assert playing.cluster.wires.under_way
    return playing


def landed(cluster: SimCluster) -> list[int]:
    events = [entry.event for entry in pool_decisions(cluster, B)]
    return [event.computed_tokens for event in events if isinstance(event, LandingEnded)]


def test_the_end_of_another_attempt_completes_nothing() -> None:
    """It would make blocks count whose last layers nobody has computed."""
    playing = in_the_step()
    cluster = playing.cluster
    late = PrefillFinished(R, 0, PREFILL, 300)
    before = len(cluster.wires.under_way)
    for word in (late, replace(late, attempt=1, worker=WorkerId("prefill-9"))):
        cluster.server.tell(WorkerSaid(PREFILL, events=(word,)))
    assert len(cluster.wires.under_way) == before, "no layer is copied that is not done"
    playing.run()
    assert landed(cluster) == [300]


def test_layers_of_a_worker_that_does_not_compute_it_are_not_sent() -> None:
    playing = in_the_step()
    cluster = playing.cluster
    before = len(cluster.wires.under_way)
    for worker, attempt in ((PREFILL, 0), (WorkerId("decode-0"), 1), (WorkerId("nobody"), 1)):
        cluster.server.tell(LayersDone(worker, ((R, attempt),), 8))
    assert len(cluster.wires.under_way) == before
    playing.run()
    assert landed(cluster) == [300]
