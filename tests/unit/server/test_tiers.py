"""The threads that move blocks to and from the tiers: what one store does is no matter of another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from baton.control.keeping import Keeping
from baton.core.keeping import LoadBlocks, StoreBlocks
from baton.core.types import BlockHash, BlockId, HostId, RequestId
from baton.kv.tier import TierRules
from baton.metrics.registry import Metrics
from baton.server import tiers as module
from baton.server.tiers import LiveTiers, OpenTier
from baton.store.memory import MemoryStore

HOST = HostId("a")
BLOCK_BYTES = 8
HEAD, END = BlockHash(b"head"), BlockHash(b"end")


class HungStore(MemoryStore):
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__(block_bytes=BLOCK_BYTES, capacity_bytes=100 * BLOCK_BYTES)
        self.let_go = threading.Event()

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        self.let_go.wait()
        return super().put(blocks)


class Told:
    """What the pool would hear."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[int, tuple[bool, ...]]] = asyncio.Queue()

    def kept(self, store: StoreBlocks, kept: Sequence[bool], now_s: float) -> None:
        self.answers.put_nowait((store.number, tuple(kept)))

    def loaded(self, load: LoadBlocks, whole: Sequence[bool], took_s: dict[str, float], now_s: float) -> None:
        self.answers.put_nowait((load.number, tuple(whole)))

    def opened(self, host: HostId, tier: str, hashes: Sequence[BlockHash], now_s: float) -> None:
        pass


@contextmanager
def _live(memory: bytearray, told: Told, **stores: MemoryStore) -> Generator[LiveTiers]:
    opened = [OpenTier(name, TierRules(name=name, blocks_max=9), store) for name, store in stores.items()]
    live = LiveTiers(opened, memoryview(memory), BLOCK_BYTES)
    live.answer(HOST, cast(Keeping, told), Metrics())
    yield live
    for store in stores.values():
        if isinstance(store, HungStore):
            store.let_go.set()
    live.close()


def _store(number: int, tier: str, name: BlockHash, block: int) -> StoreBlocks:
    return StoreBlocks(number, HOST, tier, (name,), (BlockId(block),))


def test_a_store_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 300.0)

    async def play() -> None:
        told = Told()
        good = MemoryStore(block_bytes=BLOCK_BYTES, capacity_bytes=100 * BLOCK_BYTES)
        with _live(bytearray(10 * BLOCK_BYTES), told, good=good, hung=HungStore()) as live:
            for number in range(20):
                live.keep(_store(number, "hung", BlockHash(b"%d" % number), 0))
            live.keep(_store(99, "good", HEAD, 1))
            assert await asyncio.wait_for(told.answers.get(), 30) == (99, (True,))

    asyncio.run(play())


def test_a_read_of_two_tiers_is_told_once_both_are_there() -> None:
    async def play() -> None:
        told, memory = Told(), bytearray(b"".join(bytes([block]) * BLOCK_BYTES for block in range(10)))
        stores = {
            name: MemoryStore(block_bytes=BLOCK_BYTES, capacity_bytes=100 * BLOCK_BYTES) for name in ("fast", "slow")
        }
        with _live(memory, told, **stores) as live:
            live.keep(_store(1, "fast", HEAD, 1))
            live.keep(_store(2, "slow", END, 2))
            assert {await told.answers.get(), await told.answers.get()} == {(1, (True,)), (2, (True,))}
            names = (HEAD, BlockHash(b"gone"), END)
            load = LoadBlocks(
                request_id=RequestId("r"), number=3, host=HOST, tiers=("fast", "fast", "slow"), hashes=names,
                write=(BlockId(7), BlockId(8), BlockId(9)),
            )  # fmt: skip
            live.keep(load)
            assert await told.answers.get() == (3, (True, False, True))
            assert memory[7 * BLOCK_BYTES :] == bytes([1] * BLOCK_BYTES + [8] * BLOCK_BYTES + [2] * BLOCK_BYTES)
            assert told.answers.empty()

    asyncio.run(asyncio.wait_for(play(), 30))
