"""Faults that overlap: while both last they come together, and each ends by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from baton.core.config import Topology
from baton.core.types import WorkerId
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.cells import CellJob
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, DelaySpike, Kill, Slow, StartsFail, StoreFault, StoreTrouble, TimedFault
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import HOST, ClusterSpec, SimTier, SimWorkers
from baton.lab.workload.request import Trace, TraceRequest
from tests.campaign.play import prepare_play
from tests.campaign.triggers import Fault
from tests.simulation.test_behaviour import request, scenario

SPEC = ClusterSpec(topology=Topology(prefill=1, decode=1))
DECODE = WorkerId("decode-0")
MIXED = WorkerId("mixed-0")
PROBES_S = (0.5, 1.5, 2.5, 3.5, 4.5)
"""Of faults that begin or end at whole seconds."""


def played(*faults: TimedFault) -> list[tuple[float, float]]:
    """TTFT and TPOT of 24 requests, one every half second, in the order of arrival."""
    requests = tuple(TraceRequest(at_s=0.5 * n, input_tokens=64, output_tokens=4) for n in range(24))
    trace = Trace(format="test", timing="absolute", requests=requests)
    records = play_cell(CellJob(spec=SPEC, trace=trace, policy=policy_set("baton"), seed=0, slo=None, faults=faults))
    ordered = sorted(records, key=lambda record: record.arrival_s)
    return [(record.ttft_s or 0.0, record.tpot_s or 0.0) for record in ordered]


def probed(look: Callable[[SimCluster], object], *faults: Fault) -> list[object]:
    """What somebody sees who looks at a cluster of one worker with a tier at `PROBES_S`."""
    made = scenario(request("a"), request("b", at_s=5.0), faults=faults)
    workers = (SimWorkers(role="mixed", host=HOST),)
    playing = prepare_play(replace(made, cluster=replace(made.cluster, workers=workers, tiers=(SimTier(blocks=10),))))
    seen: list[object] = []
    for at_s in PROBES_S:
        playing.cluster.loop.at(at_s, lambda: seen.append(look(playing.cluster)))
    playing.run()
    return seen


def slowdown(cluster: SimCluster) -> float | None:
    worker = cluster.worker(MIXED)
    return None if worker is None else worker.slowdown


def test_slow_workers_are_slower_by_the_product_and_then_by_what_is_left() -> None:
    long = Slow(worker=DECODE, at_s=2.2, for_s=6.0, factor=1.5)
    short = Slow(worker=DECODE, at_s=4.2, for_s=2.0, factor=2.0)
    tpots_s = [tpot_s / healthy_s for (_, tpot_s), (_, healthy_s) in zip(played(long, short), played(), strict=True)]
    assert tpots_s[:4] == [1.0] * 4
    assert tpots_s[5:8] == pytest.approx([1.5] * 3, rel=0.05)
    assert tpots_s[9:12] == pytest.approx([3.0] * 3, rel=0.05)
    assert tpots_s[13:16] == pytest.approx([1.5] * 3, rel=0.05)
    assert tpots_s[17:] == pytest.approx([1.0] * 7)
    assert played(short, long) == played(long, short)


def test_delays_of_messages_add_up_and_then_what_is_left_stays() -> None:
    long, short = DelaySpike(at_s=2.2, for_s=6.0, delay_s=0.02), DelaySpike(at_s=4.2, for_s=2.0, delay_s=0.04)
    late_s = [ttft_s - healthy_s for (ttft_s, _), (healthy_s, _) in zip(played(long, short), played(), strict=True)]
    alone_s = late_s[6]
    assert alone_s > 0.03, "at least there and back"
    assert late_s[:4] == pytest.approx([0.0] * 4, abs=0.002)
    assert late_s[9:12] == pytest.approx([3 * alone_s] * 3, rel=0.1)
    assert late_s[13:16] == pytest.approx([alone_s] * 3, rel=0.1)
    assert late_s[17:] == pytest.approx([0.0] * 7, abs=0.002)


def test_what_fails_to_start_fails_until_the_last_fault_is_over() -> None:
    faults = (StartsFail(at_s=1.0, for_s=3.0), StartsFail(at_s=2.0, for_s=1.0))
    assert probed(lambda cluster: cluster.can_start, *faults) == [True, False, False, False, True]


def test_a_store_has_every_trouble_until_that_one_is_over() -> None:
    def trouble(what: StoreTrouble, at_s: float, for_s: float) -> StoreFault:
        return StoreFault(host=HOST, tier="file", what=what, at_s=at_s, for_s=for_s)

    def troubles(cluster: SimCluster) -> list[StoreTrouble]:
        return sorted(cluster.stores.by_host_tier[HOST, "file"].troubles)

    faults = (trouble("down", 1.0, 3.0), trouble("slow", 2.0, 1.0), trouble("down", 2.0, 1.0))
    assert probed(troubles, *faults) == [[], ["down"], ["down", "down", "slow"], ["down"], []]


def test_a_worker_that_is_started_again_is_as_fast_as_ever() -> None:
    """What ends later than the process that it struck changes nobody."""
    slow = Slow(worker=MIXED, at_s=1.0, for_s=3.0, factor=4.0)
    later = Slow(worker=MIXED, at_s=3.0, for_s=2.0, factor=2.0)
    kill = Kill(worker=MIXED, at_s=2.0, death=Death(restart_s=0.1))
    assert probed(slowdown, slow, later, kill) == [1.0, 4.0, 1.0, 2.0, 2.0]
