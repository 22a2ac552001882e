"""Requests that give way and come back, with a tier below their arena. INV-8 is checked of every text."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.kv_config import Preemption
from baton.core.messages import RequestDropped
from baton.core.tier_messages import LoadBlocks, LoadEnded, ReadBack, StoreBlocks
from baton.core.types import RequestId, WorkerId
from baton.decide.control.cluster_messages import PoolDecision
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, Kill, StoreFault, StoreTrouble
from baton.lab.sim.spec import HOST, SimTier
from tests.campaign.play import play
from tests.campaign.scenario import Scenario
from tests.campaign.triggers import Fault
from tests.simulation.test_behaviour import outcome, request, scenario

FAST = SimTier(blocks=1000, latency_s=0.0001, bytes_per_s=1e6, token_bytes=1)
SLOW = replace(FAST, latency_s=1.0)
"""It takes longer to begin than any of these prompts to compute."""
NAMES = "abc"


def pressed(preemption: Preemption, *, tier: SimTier = FAST, faults: tuple[Fault, ...] = ()) -> Scenario:
    """Three requests of 3 to 23 blocks on 24: their first blocks fit, their last do not."""
    requests = [request(name, output=80, at_s=0.001 * index) for index, name in enumerate(NAMES)]
    made = scenario(*requests, topology=(0, 0, 1), blocks=24, faults=faults)
    return replace(made, cluster=replace(made.cluster, preemption=preemption, tiers=(tier,)))


def played(preemption: Preemption, *, tier: SimTier = FAST, faults: tuple[Fault, ...] = ()) -> SimCluster:
    cluster = play(pressed(preemption, tier=tier, faults=faults))
    assert [outcome(life) for life in cluster.server.journal.lives.values()] == ["finished"] * len(NAMES)
    return cluster


def pool_log(cluster: SimCluster) -> list[PoolDecision]:
    return [entry for entry in cluster.server.journal.log if isinstance(entry, PoolDecision)]


def preemptions(cluster: SimCluster) -> int:
    events = [entry.event for entry in pool_log(cluster)]
    return sum(isinstance(event, RequestDropped) and event.preempted for event in events)


def reads(cluster: SimCluster) -> list[LoadBlocks]:
    return [each for entry in pool_log(cluster) for each in entry.commands if isinstance(each, LoadBlocks)]


def unread_blocks(cluster: SimCluster) -> int:
    """Blocks that were asked back and did not come."""
    events = [entry.event for entry in pool_log(cluster)]
    return sum(event.whole.count(False) for event in events if isinstance(event, LoadEnded))


def end_s(cluster: SimCluster) -> float:
    return max(life.closes[0][0] for life in cluster.server.journal.lives.values())


def test_what_is_read_back_need_not_be_computed() -> None:
    """A block takes a tenth of a millisecond to read and four to compute."""
    computed, swapped = played("recompute"), played("swap")
    assert min(preemptions(computed), preemptions(swapped)) > 0
    assert reads(computed) == []
    assert all(load.back for load in reads(swapped))
    assert sum(len(load.hashes) for load in reads(swapped)) > 0
    assert end_s(swapped) < end_s(computed)


def first_write_s(cluster: SimCluster) -> float:
    return next(entry.now_s for entry in pool_log(cluster) for each in entry.commands if isinstance(each, StoreBlocks))


def test_what_is_computed_again_is_not_written_when_it_gives_way() -> None:
    """A write keeps blocks from those who grow. What is read again has to be written, and is at once."""
    computed, swapped = played("recompute"), played("swap")
    first_end_s = min(life.closes[0][0] for life in computed.server.journal.lives.values())
    assert first_write_s(computed) >= first_end_s > first_write_s(swapped)


def test_the_cheaper_way_reads_from_a_fast_tier() -> None:
    assert end_s(played("cheaper")) == end_s(played("swap"))


def test_the_cheaper_way_leaves_a_slow_tier_unread() -> None:
    """What was written there for nothing it has paid for: only `recompute` knows beforehand that nobody reads."""
    cluster = played("cheaper", tier=SLOW)
    answers = [entry.event for entry in pool_log(cluster) if isinstance(entry.event, ReadBack)]
    assert answers, "it was asked, and decided"
    assert reads(cluster) == []
    assert end_s(played("recompute", tier=SLOW)) < end_s(cluster) < end_s(played("swap", tier=SLOW))


def read_begun_s(cluster: SimCluster) -> float:
    """When somebody was first read back."""
    return next(entry.now_s for entry in pool_log(cluster) if isinstance(entry.event, ReadBack))


@pytest.mark.parametrize("what", ["down", "damaged", "lost"])
def test_a_store_that_does_not_give_back_what_it_took_costs_a_recompute(what: StoreTrouble) -> None:
    """It has what was put, until somebody is about to be read back."""
    whole = played("swap")
    fault = StoreFault(host=HOST, tier="file", what=what, at_s=read_begun_s(whole) - 1e-6, for_s=9.0)
    cluster = played("swap", faults=(fault,))
    assert unread_blocks(whole) == 0
    assert unread_blocks(cluster) > 0
    assert end_s(cluster) > end_s(whole)


def test_a_store_that_takes_nothing_is_not_read() -> None:
    cluster = played("swap", faults=(StoreFault(host=HOST, tier="file", what="full", at_s=0.0, for_s=9.0),))
    assert preemptions(cluster) > 0
    assert reads(cluster) == []


def test_a_read_that_hangs_holds_up_only_whoever_waits_for_it() -> None:
    """The oldest request ends no later than where as much is written, and nothing read."""
    first = RequestId(NAMES[0])
    hung = StoreFault(host=HOST, tier="file", what="slow", at_s=0.0, for_s=99.0)
    far = replace(FAST, latency_s=0.4)
    swapped, unread = (played(way, tier=far, faults=(hung,)) for way in ("swap", "cheaper"))
    ends = [each.server.journal.lives[first].closes[0][0] for each in (swapped, unread)]
    assert reads(swapped)
    assert not reads(unread)
    assert ends[0] <= ends[1]


def test_a_worker_that_dies_while_its_request_is_read_back_costs_an_attempt_and_no_token() -> None:
    tier = replace(FAST, latency_s=0.05)
    begun_s = read_begun_s(played("swap", tier=tier))
    kill = Kill(worker=WorkerId("mixed-0"), at_s=begun_s + 0.02, death=Death(restart_s=0.0))
    cluster = played("swap", tier=tier, faults=(kill,))
    assert max(life.attempt for life in cluster.server.journal.lives.values()) == 2
