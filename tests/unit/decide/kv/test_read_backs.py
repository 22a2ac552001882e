"""A preempted request comes back: its KV is read from a tier into new blocks, and nothing it waits for gets lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    PoolEvent,
    PreemptRequest,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
    StartDecode,
    StartPrefill,
    ToWorker,
    WorkerLost,
)
from baton.core.tier_messages import BlocksKept, LoadBlocks, LoadEnded, ReadBack, ReadBackWanted, StoreBlocks
from baton.core.types import BlockHash, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed

A, B = WorkerId("a"), WorkerId("b")
OLD, YOUNG = RequestId("old"), RequestId("young")
TOKENS = 4
"""Of a block."""
NAMES = tuple(BlockHash(b"%d" % depth) for depth in range(3))
"""Of the blocks that the young one has sealed."""


def request(name: RequestId, at_s: float) -> Request:
    return Request(id=name, prompt_tokens=8, output_tokens_max=40, arrived_at_s=at_s)


@dataclass
class Host:
    """A pool of nine blocks with a tier below it, and all that it has said."""

    pool: HostPool = field(
        default_factory=lambda: HostPool(
            host=HostId("h"),
            blocks_total=9,
            block_tokens=TOKENS,
            eviction=LeastRecentlyUsed,
            tiers=[Tier(TierRules(name="file", blocks_max=100, writing_blocks_max=100), LeastRecentlyUsed)],
        )
    )
    said: list[PoolCommand] = field(default_factory=list[PoolCommand])

    def tell(self, event: PoolEvent) -> list[PoolCommand]:
        """Handle an event. Whatever is to be written is written at once."""
        commands = self.pool.handle(event)
        self.said += commands
        for command in commands:
            if isinstance(command, StoreBlocks):
                self.tell(BlocksKept(command.number, (True,) * len(command.hashes)))
        self.pool.check()
        return commands


def granted(commands: Sequence[PoolCommand], name: RequestId) -> list[BlocksGranted]:
    told = [command.command for command in commands if isinstance(command, ToWorker)]
    return [grant for grant in told if isinstance(grant, BlocksGranted) and grant.request_id == name]


def preempted() -> Host:
    """The young one had four blocks, three of them sealed, and gave them to the old one, which has all nine now."""
    host = Host()
    host.tell(StartPrefill(request(OLD, 0.0), 1, A, "end"))
    host.tell(StartPrefill(request(YOUNG, 1.0), 1, A, "end"))
    host.tell(BlocksWanted(OLD, 1, A, 4))
    host.tell(BlocksWanted(YOUNG, 1, A, 4))
    host.tell(BlocksSealed(YOUNG, 1, A, 0, NAMES))
    assert ToWorker(A, PreemptRequest(YOUNG, 1)) in host.tell(BlocksWanted(OLD, 1, A, 6))
    host.tell(RequestDropped(YOUNG, 1, A, preempted=True))
    host.tell(BlocksWanted(OLD, 1, A, 9))
    assert len(host.pool.table(OLD)[0]) == 9
    return host


def come_back(host: Host) -> ReadBackWanted:
    """The old one ends, and the young one is given blocks again."""
    assert host.tell(BlocksWanted(YOUNG, 1, A, 4, NAMES)) == []
    commands = [*host.tell(RequestFinished(OLD, 1, A, "length")), *host.tell(ReleaseBlocks(OLD))]
    (wanted,) = [command for command in commands if isinstance(command, ReadBackWanted)]
    assert not granted(commands, YOUNG), "its worker would compute in blocks that are about to be read into"
    return wanted


def begin(host: Host, number: int = 7) -> LoadBlocks:
    (load,) = host.tell(ReadBack(YOUNG, number, 3 * TOKENS))
    assert isinstance(load, LoadBlocks)
    return load


def test_its_sealed_blocks_are_written_when_it_gives_way_and_read_when_it_comes_back() -> None:
    host = preempted()
    assert {name for store in host.said if isinstance(store, StoreBlocks) for name in store.hashes} == set(NAMES)
    assert come_back(host) == ReadBackWanted(YOUNG, HostId("h"), A, NAMES)
    load = begin(host)
    assert (load.hashes, load.back) == (NAMES, True)
    assert host.pool.table(YOUNG) == ((), 0), "the blocks cannot be used yet"
    (grant,) = granted(host.tell(LoadEnded(YOUNG, 7, (True, True, True))), YOUNG)
    assert grant.cached_blocks == 3
    assert grant.block_table[:3] == load.write
    assert host.pool.sealed_hashes(YOUNG) == NAMES


def test_what_could_not_be_read_is_computed() -> None:
    """The block behind one that is damaged is no prefix any more, whole as it is."""
    host = preempted()
    come_back(host)
    begin(host)
    (grant,) = granted(host.tell(LoadEnded(YOUNG, 7, (True, False, True))), YOUNG)
    assert grant.cached_blocks == 1


def test_where_nothing_is_to_be_read_it_goes_on_at_once() -> None:
    host = preempted()
    come_back(host)
    (grant,) = granted(host.tell(ReadBack(YOUNG, 7, 0)), YOUNG)
    assert grant.cached_blocks == 0
    assert host.pool.view().blocks_used == len(grant.block_table)


def test_what_is_in_the_tier_already_is_not_written_again() -> None:
    """It is preempted a second time, with the same blocks."""
    host = preempted()
    come_back(host)
    begin(host)
    host.tell(LoadEnded(YOUNG, 7, (True, True, True)))
    host.said.clear()
    host.tell(StartPrefill(request(RequestId("older"), -1.0), 1, A, "end"))
    host.tell(BlocksWanted(RequestId("older"), 1, A, 2))
    host.tell(BlocksWanted(RequestId("older"), 1, A, 9))
    assert ToWorker(A, PreemptRequest(YOUNG, 1)) in host.said
    host.tell(RequestDropped(YOUNG, 1, A, preempted=True))
    assert not [command for command in host.said if isinstance(command, StoreBlocks)]


def test_a_successor_does_not_wait_for_what_a_dead_worker_was_to_get() -> None:
    """INV-3: nothing else is put into those blocks until the read has ended."""
    host = preempted()
    come_back(host)
    load = begin(host)
    host.tell(WorkerLost(A, "killed"))
    host.tell(StartDecode(request(YOUNG, 1.0), 2, B))
    assert host.pool.table(YOUNG) == ((), 0)
    (grant,) = granted(host.tell(BlocksWanted(YOUNG, 2, B, 4)), YOUNG)
    assert not set(grant.block_table) & set(load.write)
    assert not granted(host.tell(LoadEnded(YOUNG, 7, (True, True, True))), YOUNG)
    assert host.pool.table(YOUNG) == (grant.block_table, 0)
    assert host.pool.view().blocks_used == len(grant.block_table)


def test_more_that_it_asks_for_meanwhile_it_gets_when_it_is_read() -> None:
    host = preempted()
    come_back(host)
    begin(host)
    assert host.tell(BlocksWanted(YOUNG, 1, A, 7)) == []
    first, second = granted(host.tell(LoadEnded(YOUNG, 7, (True, True, True))), YOUNG)
    assert (first.cached_blocks, len(second.block_table)) == (3, 7)


def test_a_read_may_end_between_two_workers() -> None:
    """No request waits for the blocks that were read: the next request starts a new read."""
    host = preempted()
    come_back(host)
    begin(host)
    host.tell(WorkerLost(A, "killed"))
    assert host.tell(LoadEnded(YOUNG, 7, (True, True, True))) == []
    assert (host.pool.table(YOUNG), host.pool.view().blocks_used) == (((), 0), 0)


def test_the_end_of_an_older_read_is_not_that_of_the_one_that_is_waited_for() -> None:
    """Its worker dies, the next one gives way in turn, and then reads the same again."""
    host = preempted()
    come_back(host)
    begin(host)
    host.tell(WorkerLost(A, "killed"))
    host.tell(StartPrefill(request(OLD, 0.0), 1, B, "end"))
    host.tell(BlocksWanted(OLD, 1, B, 1))
    host.tell(StartDecode(request(YOUNG, 1.0), 2, B))
    host.tell(BlocksWanted(YOUNG, 2, B, 1))
    host.tell(BlocksWanted(OLD, 1, B, 4))
    host.tell(RequestDropped(YOUNG, 2, B, preempted=True))
    host.tell(RequestFinished(OLD, 1, B, "length"))
    host.tell(ReleaseBlocks(OLD))
    commands = host.tell(BlocksWanted(YOUNG, 2, B, 4, NAMES))
    assert [command.worker for command in commands if isinstance(command, ReadBackWanted)] == [B]
    begin(host, 8)
    assert not granted(host.tell(LoadEnded(YOUNG, 7, (True, True, True))), YOUNG)
    (grant,) = granted(host.tell(LoadEnded(YOUNG, 8, (True, True, True))), YOUNG)
    assert (grant.attempt, grant.cached_blocks) == (2, 3)


def test_a_successor_may_come_before_the_news_of_the_death() -> None:
    host = preempted()
    come_back(host)
    load = begin(host)
    host.tell(StartDecode(request(YOUNG, 1.0), 2, B))
    (grant,) = granted(host.tell(BlocksWanted(YOUNG, 2, B, 4)), YOUNG)
    assert not set(grant.block_table) & set(load.write)


def test_nothing_is_granted_to_a_request_that_was_cancelled_while_it_was_read() -> None:
    host = preempted()
    come_back(host)
    begin(host)
    host.tell(ReleaseBlocks(YOUNG))
    assert host.tell(LoadEnded(YOUNG, 7, (True, True, True))) == []
    host.tell(RequestDropped(YOUNG, 1, A, preempted=False))
    assert (host.pool.view().blocks_used, host.pool.holders) == (0, 0)


def test_a_request_that_is_over_is_freed_when_its_read_has_ended() -> None:
    host = preempted()
    come_back(host)
    load = begin(host)
    host.tell(ReleaseBlocks(YOUNG))
    host.tell(RequestDropped(YOUNG, 1, A, preempted=False))
    assert host.pool.view().blocks_used >= len(load.write)
    assert host.tell(LoadEnded(YOUNG, 7, (True, True, True))) == []
    assert (host.pool.view().blocks_used, host.pool.holders) == (0, 0)


def test_a_request_is_not_preempted_while_its_blocks_are_read() -> None:
    """INV-3: its blocks are taken only when the read has ended; an older one waits for that, and then gets them."""
    host = preempted()
    come_back(host)
    begin(host)
    older = RequestId("older")
    host.tell(StartPrefill(request(older, -1.0), 1, A, "end"))
    host.tell(BlocksWanted(older, 1, A, 2))
    assert host.tell(BlocksWanted(older, 1, A, 9)) == []
    commands = host.tell(LoadEnded(YOUNG, 7, (True, True, True)))
    assert ToWorker(A, PreemptRequest(YOUNG, 1)) in commands
