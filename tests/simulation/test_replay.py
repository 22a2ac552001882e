"""INV-7: a log reproduces every decision: of the coordinator, of the pools and of the transfers."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from msgspec.structs import replace

from baton.core.config import BatchLimits
from baton.core.copies import CopyBlocks, LandingGranted, LandingWanted, LeaseWanted
from baton.core.handoff_paths import PathChosen
from baton.core.messages import BlocksGranted, HostLost, StartDecode, StartPrefill, ToWorker
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.tier_messages import DropBlocks, LoadBlocks, LoadWanted, PutWanted, StoreBlocks
from baton.decide.control.cluster_messages import BeginRequest, HostAdded, ToPool
from baton.decide.control.decision_log import Decision, replay
from baton.lab.sim.cluster import SimCluster, fresh_cluster
from baton.lab.sim.faults import HostKill
from baton.lab.sim.spec import SimTier
from tests.campaign.play import play
from tests.campaign.restless import play_policies
from tests.campaign.scenario import RESTLESS
from tests.simulation.test_behaviour import request
from tests.simulation.test_central import POOL
from tests.simulation.test_hosts import B, two_hosts

OWN = SimTier(name="file", blocks=60, latency_s=0.001, bytes_per_s=1e7, token_bytes=100)
REQUESTS = [request(f"r{place}", tokens=120, output=20, at_s=place * 0.15) for place in range(9)]
AGAIN = [request("again", tokens=120, output=20, at_s=4.0)]
DOWN = HostKill(host=B, at_s=0.8, notice_s=0.05, restart_s=0.3)


@pytest.fixture(scope="module")
def played() -> SimCluster:
    """Two hosts with a tier each and a pool of both, little memory, and a host that is lost in between."""
    made = two_hosts(*REQUESTS, *AGAIN, faults=(DOWN,), policy=RESTLESS)
    kv, batch = replace(made.cluster.kv, blocks=90), BatchLimits(requests_max=4)
    return play(replace(made, cluster=replace(made.cluster, tiers=(OWN, POOL), kv=kv, batch=batch, tick_s=0.1)))


def stored(decisions: list[Decision]) -> list[Decision]:
    """Return what a log file gives back."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(decisions), type=list[Decision])


def replayed(played: SimCluster, decisions: list[Decision]) -> int | None:
    """Return the index of the first decision that a fresh cluster makes otherwise."""
    fresh = fresh_cluster(played.spec, play_policies(played.spec, RESTLESS))
    _, difference = replay(fresh, decisions)
    return None if difference is None else difference.index


def test_hosts_tiers_a_pool_and_a_fault_are_replayed(played: SimCluster) -> None:
    """The log holds what every machine has ordered, and a fresh cluster orders the same."""
    decisions = stored(played.server.journal.turns)
    commands = [command for decision in decisions for command in decision.commands]
    kinds = Counter(type(command) for command in commands)
    for kind in (StartPrefill, StartDecode, BeginRequest, CopyBlocks, StoreBlocks, LoadBlocks, DropBlocks, PathChosen):
        assert kinds[kind], f"no {kind.__name__} was decided"
    for kind in (LandingGranted, BlocksStored, BlocksRemoved, ToWorker):
        assert kinds[kind], f"no pool has answered with {kind.__name__}"
    told = Counter(type(command.event) for command in commands if isinstance(command, ToPool))
    for kind in (LandingWanted, LeaseWanted, LoadWanted, PutWanted):
        assert told[kind], f"no pool was told {kind.__name__}"
    events = Counter(type(decision.event) for decision in decisions)
    assert (events[HostAdded], events[HostLost]) == (3, 1)
    assert replayed(played, decisions) is None


@pytest.mark.parametrize("kind", [BlocksGranted, LandingWanted, CopyBlocks, LoadBlocks, StoreBlocks, PathChosen])
def test_a_decision_that_was_made_otherwise_is_found(played: SimCluster, kind: type) -> None:
    """Of a pool, of a transfer, of a tier, of a path: where the log says something else, the replay stops."""
    decisions = stored(played.server.journal.turns)

    def is_of_kind(command: object) -> bool:
        inner = command.command if isinstance(command, ToWorker) else command
        return isinstance(inner.event if isinstance(inner, ToPool) else inner, kind)

    index = next(place for place, each in enumerate(decisions) if any(map(is_of_kind, each.commands)))
    left = [command for command in decisions[index].commands if not is_of_kind(command)]
    decisions[index] = replace(decisions[index], commands=tuple(left))
    assert replayed(played, decisions) == index


def test_an_event_of_a_tier_that_the_log_lacks_is_found(played: SimCluster) -> None:
    """Stores answer from outside: without an answer, later decisions differ."""
    decisions = stored(played.server.journal.turns)
    index = next(place for place, each in enumerate(decisions) if type(each.event).__name__ == "FromTier" and place > 9)
    del decisions[index]
    assert replayed(played, decisions) is not None
