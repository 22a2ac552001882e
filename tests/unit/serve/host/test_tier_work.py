"""The threads that read and write tiers: hung and failing stores, large commands, and order."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest

from baton.core.errors import StoreError, TransferError
from baton.core.tier_messages import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    StoreBlocks,
    StoreEvent,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import BlockHash, BlockId, HostId, RequestId
from baton.decide.kv.tier import TierRules
from baton.move.backoff import Backoff
from baton.move.store.memory import MemoryStore
from baton.move.transport.staged import StagedMemory
from baton.serve.host import tier_recovery, tier_work
from baton.serve.host.arena_bytes import DeviceBytes, HostBytes
from baton.serve.host.tier_opening import OpenTier, UnopenedTier
from baton.serve.host.tier_work import TierWork
from tests.transfers.host_device_memory import HostDeviceMemory

HOST = HostId("a")
BLOCK_BYTES = 8
HEAD, END = BlockHash(b"head"), BlockHash(b"end")


class PlainStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(block_bytes=BLOCK_BYTES, capacity_bytes=100 * BLOCK_BYTES)
        self.calls: list[int] = []
        """Blocks of each read."""

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        self.calls.append(len(blocks))
        return super().get(blocks)


class HungStore(PlainStore):
    """A store that blocks every write until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        self.let_go.wait()
        return super().put(blocks)


class BrokenStore(PlainStore):
    """A store that fails for a while."""

    is_broken = True

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        if self.is_broken:
            raise StoreError("it is broken")
        return super().get(blocks)


class LateStore(PlainStore):
    """A store whose drop blocks until it is released: later writes must not overtake it."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        self.let_go.wait()
        super().drop(hashes)


class BrokenArena:
    """Implements `ArenaBytes` on a device that has failed."""

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        raise TransferError("the GPU does not copy KV")

    def write(self, blocks: Sequence[int], contents: np.ndarray) -> None:
        raise TransferError("the GPU does not copy KV")

    def close(self) -> None:
        pass


class Playing:
    """Tier work on an arena in which every byte of a block is its number."""

    def __init__(self, stores: dict[str, PlainStore]) -> None:
        self.memory = bytearray(b"".join(bytes([block]) * BLOCK_BYTES for block in range(10)))
        self.news: SimpleQueue[StoreEvent] = SimpleQueue()
        opened = [OpenTier(TierRules(name=name, blocks_max=9), store) for name, store in stores.items()]
        self.work = TierWork(opened, HostBytes(memoryview(self.memory), BLOCK_BYTES), BLOCK_BYTES, self.news.put)

    def next(self) -> StoreEvent:
        return self.news.get(timeout=30)

    def write(self, number: int, tier: str, *names: BlockHash) -> None:
        blocks = tuple(BlockId(place + 1) for place in range(len(names)))
        self.work.keep(StoreBlocks(number, HOST, tier, names, blocks))

    def read(self, number: int, tiers: Sequence[str], names: Sequence[BlockHash], first: int = 6) -> None:
        write = tuple(BlockId(first + place) for place in range(len(names)))
        self.work.keep(LoadBlocks(RequestId("r"), number, HOST, tuple(tiers), tuple(names), write))

    def block(self, number: int) -> bytes:
        return bytes(self.memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES])


@contextmanager
def playing(**stores: PlainStore) -> Generator[Playing]:
    played = Playing(stores)
    yield played
    for store in stores.values():
        if isinstance(store, HungStore | LateStore):
            store.let_go.set()
    assert played.work.close() == []


def test_a_store_that_hangs_holds_up_no_other() -> None:
    with playing(good=PlainStore(), hung=HungStore()) as played:
        for number in range(20):
            played.write(number, "hung", BlockHash(b"%d" % number))
        played.write(99, "good", HEAD)
        assert played.next() == BlocksKept(99, (True,))


def test_a_read_of_two_tiers_is_told_once_both_are_there() -> None:
    with playing(fast=PlainStore(), slow=PlainStore()) as played:
        played.write(1, "fast", HEAD)
        played.write(2, "slow", HEAD, END)
        assert {played.next(), played.next()} == {BlocksKept(1, (True,)), BlocksKept(2, (True, True))}
        played.read(3, ("fast", "fast", "slow"), (HEAD, BlockHash(b"gone"), END))
        ended = played.next()
        assert isinstance(ended, LoadEnded)
        assert (ended.number, ended.whole, set(ended.took_s)) == (3, (True, False, True), {"fast", "slow"})
        assert (played.block(6), played.block(7), played.block(8)) == (b"\1" * 8, b"\7" * 8, b"\2" * 8)


def test_large_reads_are_done_in_pieces_and_end_where_a_block_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_work, "PIECE_BYTES", 2 * BLOCK_BYTES)
    store = PlainStore()
    with playing(file=store) as played:
        names = [BlockHash(b"%d" % number) for number in range(5)]
        played.write(1, "file", *names)
        assert played.next() == BlocksKept(1, (True,) * 5)
        played.read(2, ["file"] * 4, names[:4])
        ended = played.next()
        assert isinstance(ended, LoadEnded)
        assert (ended.whole, store.calls) == ((True,) * 4, [2, 2])
        played.work.keep(DropBlocks(HOST, "file", (names[1],)))
        played.write(3, "file", HEAD)  # behind the drop
        assert played.next() == BlocksKept(3, (True,))
        played.read(4, ["file"] * 4, names[:4])
        ended = played.next()
        assert isinstance(ended, LoadEnded)
        assert (ended.whole, store.calls) == ((True, False, False, False), [2, 2, 2])


def test_what_takes_too_long_is_answered_for_and_touches_no_block_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_work, "ANSWER_S", 0.0)
    hung = HungStore()
    with playing(hung=hung) as played:
        played.write(1, "hung", HEAD)
        assert played.next() == BlocksKept(1, (False,))
        hung.let_go.set()
        played.work.keep(DropBlocks(HOST, "hung", (HEAD,)))
    assert played.news.empty(), "a late answer is told"


def test_a_store_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_work, "CLOSE_S", 0.0)
    hung = HungStore()
    played = Playing({"hung": hung})
    played.write(1, "hung", HEAD)
    assert played.work.close() == ["hung"]
    hung.let_go.set()


def test_a_store_that_fails_again_and_again_is_left_alone_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_recovery, "BACKOFF", Backoff(0.0, 60.0))
    store = BrokenStore()
    with playing(file=store) as played:
        for number in range(tier_recovery.FAILURES_MAX):
            played.read(number, ["file"], [HEAD])
        said = [played.next() for _ in range(tier_recovery.FAILURES_MAX + 2)]
        assert TierRests("file", rests=True) in said
        assert TierRests("file", rests=False) in said
        assert sum(isinstance(news, LoadEnded) for news in said) == tier_recovery.FAILURES_MAX
        store.is_broken = False
        played.write(9, "file", HEAD)
        assert played.next() == BlocksKept(9, (True,))


def test_a_block_that_is_dropped_and_stored_again_is_there() -> None:
    late = LateStore()
    with playing(late=late) as played:
        played.write(1, "late", HEAD)
        assert played.next() == BlocksKept(1, (True,))
        played.work.keep(DropBlocks(HOST, "late", (HEAD,)))
        played.write(2, "late", HEAD)
        late.let_go.set()
        assert played.next() == BlocksKept(2, (True,))
        assert late.held() == [HEAD]


def test_what_others_put_into_a_shared_store_is_told_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name once, in pieces."""
    monkeypatch.setattr(tier_work, "LIST_PIECE", 2)
    store, names = PlainStore(), [BlockHash(b"%d" % number) for number in range(4)]
    store.put([(name, memoryview(bytes(BLOCK_BYTES))) for name in names[:3]])
    played = Playing({})
    work = TierWork(
        [OpenTier(TierRules(name="pool", blocks_max=9), store, list_s=1e-6)],
        HostBytes(memoryview(played.memory), BLOCK_BYTES),
        BLOCK_BYTES,
        played.news.put,
    )
    work.list_held()
    assert played.next() == TierOpened("pool", tuple(names[:2]), more=True)
    assert played.next() == TierOpened("pool", (names[2],))
    store.put([(names[3], memoryview(bytes(BLOCK_BYTES)))])
    while (news := played.next()) == TierOpened("pool", ()):
        pass
    assert news == TierOpened("pool", (names[3],))
    assert work.close() == played.work.close() == []


def test_a_store_that_has_less_room_than_it_was_to_have_says_so_once() -> None:
    store = PlainStore()
    with playing(file=store) as played:
        store.capacity_blocks = 4
        for number in range(2):
            played.write(number, "file", BlockHash(b"%d" % number))
        assert [played.next() for _ in range(3)] == [
            BlocksKept(0, (True,)),
            TierShrunk("file", 4),
            BlocksKept(1, (True,)),
        ]


def test_what_an_earlier_run_has_left_is_listed() -> None:
    store = PlainStore()
    store.put([(HEAD, memoryview(bytes(BLOCK_BYTES)))])
    with playing(file=store, other=PlainStore()) as played:
        played.work.list_held()
        said = [played.next(), played.next()]
        assert TierOpened("file", (HEAD,)) in said
        assert TierOpened("other", ()) in said


class BuggyStore(PlainStore):
    """A store that raises an unexpected error."""

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        raise LookupError("a bug of a store")

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        raise LookupError("a bug of a store")


def test_a_bug_in_a_store_is_answered_for_and_its_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(str(args.exc_value)))
    with playing(file=BuggyStore()) as played:
        for number in range(2):  # a store has one thread that writes
            played.write(number, "file", HEAD)
            assert played.next() == BlocksKept(number, (False,))
        for number in range(tier_work.READERS + 1):
            played.read(number, ["file"], [HEAD])
            ended = played.next()
            assert isinstance(ended, LoadEnded)
            assert ended.whole == (False,)
    assert told == ["a bug of a store"] * (2 + tier_work.READERS + 1)


def test_a_tier_whose_store_could_not_be_opened_keeps_nothing_and_has_nothing() -> None:
    with playing(file=PlainStore()) as played:
        played.work.keep(DropBlocks(HOST, "pool", (HEAD,)))
        played.write(1, "pool", HEAD)
        assert played.next() == BlocksKept(1, (False,))
        played.write(2, "file", HEAD)
        assert played.next() == BlocksKept(2, (True,))
        played.read(3, ["file", "pool"], [HEAD, END])
        both = played.next()
        played.read(4, ["pool"], [END])
        none = played.next()
        assert isinstance(both, LoadEnded)
        assert isinstance(none, LoadEnded)
        assert (both.whole, set(both.took_s)) == ((True, False), {"file"})
        assert (none.whole, none.took_s) == ((False,), {})


def test_a_device_that_fails_keeps_and_reads_nothing_and_is_answered_for() -> None:
    """The stored blocks stay there."""
    store, news = PlainStore(), SimpleQueue[StoreEvent]()
    store.put([(HEAD, memoryview(bytes(BLOCK_BYTES)))])
    opened = [OpenTier(TierRules(name="tier", blocks_max=9), store)]
    work = TierWork(opened, BrokenArena(), BLOCK_BYTES, news.put)
    work.keep(StoreBlocks(1, HOST, "tier", (END,), (BlockId(1),)))
    assert news.get(timeout=30) == BlocksKept(1, (False,))
    work.keep(LoadBlocks(RequestId("r"), 2, HOST, ("tier",), (HEAD,), (BlockId(2),)))
    ended = news.get(timeout=30)
    assert isinstance(ended, LoadEnded)
    assert ended.whole == (False,)
    assert store.held() == [HEAD]
    assert work.close() == []


def test_an_arena_on_a_device_keeps_and_gets_blocks_as_one_of_the_host_does() -> None:
    memory = bytearray(b"".join(bytes([block]) * BLOCK_BYTES for block in range(10)))
    staged = StagedMemory(HostDeviceMemory(memoryview(memory)), portion_bytes=5, lanes=1)
    opened = [OpenTier(TierRules(name="tier", blocks_max=9), PlainStore())]
    news = SimpleQueue[StoreEvent]()
    work = TierWork(opened, DeviceBytes(staged, BLOCK_BYTES), BLOCK_BYTES, news.put)
    work.keep(StoreBlocks(1, HOST, "tier", (HEAD, END), (BlockId(3), BlockId(1))))
    assert news.get(timeout=30) == BlocksKept(1, (True, True))
    work.keep(LoadBlocks(RequestId("r"), 2, HOST, ("tier",) * 2, (HEAD, END), (BlockId(7), BlockId(6))))
    ended = news.get(timeout=30)
    assert isinstance(ended, LoadEnded)
    assert ended.whole == (True, True)
    assert bytes(memory) == b"".join(bytes([block]) * BLOCK_BYTES for block in (0, 1, 2, 3, 4, 5, 1, 3, 8, 9))
    assert work.close() == []


def test_a_store_that_was_down_at_the_start_is_tried_until_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its tier is unused. Then its blocks and its smaller capacity are reported."""
    monkeypatch.setattr(tier_recovery, "BACKOFF", Backoff(0.001, 60.0))
    store, tries = PlainStore(), iter((StoreError("it is down"), StoreError("it is down"), None))
    store.put([(HEAD, memoryview(bytes(BLOCK_BYTES)))])

    def opened() -> OpenTier:
        trouble = next(tries)
        if trouble is not None:
            raise trouble
        return OpenTier(TierRules(name="late", blocks_max=100), store)

    news: SimpleQueue[StoreEvent] = SimpleQueue()
    unopened = UnopenedTier(TierRules(name="late", blocks_max=1000), "it is down", opened)
    work = TierWork([unopened], HostBytes(memoryview(bytearray(BLOCK_BYTES * 10)), BLOCK_BYTES), BLOCK_BYTES, news.put)
    work.keep(StoreBlocks(1, HOST, "late", (END,), (BlockId(1),)))
    assert news.get(timeout=30) == BlocksKept(1, (False,)), "nobody waits for it"
    work.list_held()
    told = [news.get(timeout=30) for _ in range(4)]
    assert told == [
        TierRests("late", rests=True),
        TierShrunk("late", 100),
        TierRests("late", rests=False),
        TierOpened("late", (HEAD,)),
    ]
    work.keep(StoreBlocks(2, HOST, "late", (END,), (BlockId(1),)))
    assert news.get(timeout=30) == BlocksKept(2, (True,))
    work.list_held()
    assert news.get(timeout=30) == TierOpened("late", (HEAD, END)), "it is tried once only"
    assert work.close() == []


def test_a_store_that_opens_after_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its opening hung until after the close: it is closed again at once."""
    monkeypatch.setattr(tier_recovery, "BACKOFF", Backoff(0.001, 60.0))
    asked, let_go, closed = threading.Event(), threading.Event(), threading.Event()

    class ToldStore(PlainStore):
        def close(self) -> None:
            closed.set()

    def opened() -> OpenTier:
        asked.set()
        let_go.wait()
        return OpenTier(TierRules(name="late", blocks_max=9), ToldStore())

    news: SimpleQueue[StoreEvent] = SimpleQueue()
    unopened = UnopenedTier(TierRules(name="late", blocks_max=9), "it hangs", opened)
    work = TierWork([unopened], HostBytes(memoryview(bytearray(BLOCK_BYTES * 10)), BLOCK_BYTES), BLOCK_BYTES, news.put)
    work.list_held()
    assert asked.wait(30)
    assert work.close() == [], "nobody waits for who opens it"
    let_go.set()
    assert closed.wait(30)
    assert news.get(timeout=30) == TierRests("late", rests=True)
    assert news.empty()
