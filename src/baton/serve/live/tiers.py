"""The tiers of all hosts in the live server: pass on the pools' commands, track and count their reads and writes.

Threads of this process copy the bytes for the server's own host. For a joined host, its mover copies them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from baton.core.tier_messages import (
    BlocksKept,
    DropBlocks,
    FromTier,
    LoadBlocks,
    LoadEnded,
    StoreBlocks,
    StoreEvent,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import HostId, HostView, RequestId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.spill import SpillSpace
from baton.decide.kv.tier import Tier
from baton.decide.metrics.catalog import ARENA_TIER, READ_BACK_BLOCKS, TIER_BLOCKS, TIER_RESTS
from baton.serve.host.arena_bytes import ArenaBytes
from baton.serve.host.tier_opening import OpenTier
from baton.serve.host.tier_work import ANSWER_S, TierWork
from baton.serve.live.live_request import LiveRequest
from baton.serve.live.metrics_registry import Metrics
from baton.serve.messages.moving import ListTiers, TierOrder

log = logging.getLogger("baton.server")

OrderSender = Callable[[TierOrder], bool]
"""Passes an order to the threads or the mover of a host. Returns False if no mover is running."""


class Listener(Protocol):
    """Receives the events of tiers. Implemented by the driver."""

    @property
    def pools(self) -> Mapping[HostId, HostPool]: ...

    def tell(self, event: FromTier) -> None: ...

    @property
    def live(self) -> Mapping[RequestId, LiveRequest]: ...


class LiveTiers:
    """Performs the tier commands of pools. All calls and answers are on the event loop.

    The pools bound the pending reads and writes: they limit their writes, and each read belongs to a live request.
    """

    def __init__(self, metrics: Metrics, listener: Listener) -> None:
        self._metrics = metrics
        self._listener = listener
        self._is_closed = False
        self._senders: dict[HostId, OrderSender] = {}
        self._writes: dict[tuple[HostId, int], StoreBlocks] = {}
        self._loads: dict[int, LoadBlocks] = {}

    def close(self) -> None:
        """Ignore all further events, because the server ends."""
        self._is_closed = True

    def add_host(self, host: HostId, send: OrderSender) -> None:
        """Set how orders reach a host, and order it to list the blocks in its tiers. Call it again for a new mover."""
        self._senders[host] = send
        send(ListTiers())

    def lose_host(self, host: HostId) -> None:
        """Remove a lost host, and fail its pending reads and writes."""
        self._senders.pop(host, None)
        self.end_all(host)

    def end_all(self, host: HostId) -> None:
        """Fail the pending reads and writes of a host whose mover is dead."""
        for place, write in [(place, write) for place, write in self._writes.items() if place[0] == host]:
            self.handle_event(place[0], _failure(write))
        for load in [load for load in self._loads.values() if load.host == host]:
            self.handle_event(host, _failure(load))
        pool = self._listener.pools.get(host)
        for tier in sorted(pool.tiers.resting) if pool is not None and pool.tiers is not None else ():
            self.handle_event(host, TierRests(tier, rests=False))  # the next mover counts failures from zero

    def perform(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Pass on a command of a pool.

        Each write and each read is answered exactly once, within `ANSWER_S` seconds, even if it fails.
        """
        send = self._senders.get(command.host)
        if isinstance(command, StoreBlocks):
            self._writes[command.host, command.number] = command
        elif isinstance(command, LoadBlocks):
            self._loads[command.number] = command
        if (send is None or not send(command)) and not isinstance(command, DropBlocks):
            asyncio.get_running_loop().call_soon(self.handle_event, command.host, _failure(command))

    def handle_event(self, host: HostId, event: StoreEvent) -> None:
        """Count an event of a tier and pass it to the cluster. Repeated answers are ignored."""
        if self._is_closed:
            return
        match event:
            case BlocksKept(number=number, kept=kept):
                write = self._writes.pop((host, number), None)
                if write is not None and len(kept) == len(write.blocks):
                    self._count(host, write.tier, "stored", sum(kept))
                    self._count(host, write.tier, "refused", len(kept) - sum(kept))
                    self._listener.tell(FromTier(host, event))
            case LoadEnded(number=number):
                load = self._loads.get(number)
                if load is not None and load.host == host and len(event.whole) == len(load.write):
                    del self._loads[number]
                    self._count_load(load, event)
                    self._listener.tell(FromTier(host, event))
            case TierOpened() | TierRests() | TierShrunk():
                if isinstance(event, TierRests) and event.rests:
                    self._metrics.count(TIER_RESTS, host, event.tier, amount=1)
                if host in self._listener.pools:
                    self._listener.tell(FromTier(host, event))

    def _count_load(self, load: LoadBlocks, end: LoadEnded) -> None:
        for tier, is_whole in zip(load.tiers, end.whole, strict=True):
            self._count(load.host, tier, "loaded" if is_whole else "missed", 1)
            if is_whole and load.back:
                self._metrics.count(READ_BACK_BLOCKS, load.host, tier, amount=1)
        self._note_loss(load, end)
        for tier, blocks in end.damaged.items():
            self._count(load.host, tier, "damaged", blocks)

    def _note_loss(self, load: LoadBlocks, end: LoadEnded) -> None:
        """Record that a request has read KV that a tier has rounded."""
        pool, live = self._listener.pools.get(load.host), self._listener.live.get(load.request_id)
        if pool is None or pool.tiers is None or live is None:
            return
        used = {tier for tier, is_whole in zip(load.tiers, end.whole, strict=True) if is_whole}
        losses = [tier.rules.loss for tier in pool.tiers.tiers if tier.name in used and tier.rules.loss]
        live.stamps.kv_loss = next(iter(losses), live.stamps.kv_loss)

    def _count(self, host: HostId, tier: str, what: str, blocks: int) -> None:
        self._metrics.count(TIER_BLOCKS, host, tier, what, amount=blocks)


class OwnTiers:
    """The tiers of the server's own host. Threads of this process do the work; answers come on the event loop."""

    def __init__(self, live: LiveTiers, host: HostId, opened: Sequence[OpenTier]) -> None:
        self.rules = tuple(tier.rules for tier in opened)
        self._live = live
        self._host = host
        self._opened = opened
        self._work: TierWork | None = None
        self._unlisted = {tier.name for tier in opened}
        self._listed = asyncio.Event()

    async def start(self, arena: ArenaBytes, block_bytes: int) -> None:
        """Start the threads, and wait for the lists of blocks of earlier runs, for at most `ANSWER_S` seconds."""
        loop = asyncio.get_running_loop()
        work = self._work = TierWork(self._opened, arena, block_bytes, partial(self._tell, loop))
        self._live.add_host(self._host, partial(_do, work))
        try:
            await asyncio.wait_for(self._listed.wait(), ANSWER_S)
        except TimeoutError:
            log.warning(
                "tiers %s have not listed their blocks yet; they are used once listed", ", ".join(self._unlisted)
            )

    async def close(self) -> None:
        """Finish the current writes and close the stores. A store that hangs stays open until the process ends."""
        self._live.close()
        if self._work is not None:
            for name in await asyncio.to_thread(self._work.close):
                log.warning("tier %s still reads or writes at shutdown: its store is not closed", name)

    def _tell(self, loop: asyncio.AbstractEventLoop, event: StoreEvent) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._handle_event, event)

    def _handle_event(self, event: StoreEvent) -> None:
        self._live.handle_event(self._host, event)
        if isinstance(event, TierOpened) and not event.more:
            self._unlisted.discard(event.tier)
            if not self._unlisted:
                self._listed.set()


def _do(work: TierWork, order: TierOrder) -> bool:
    if isinstance(order, ListTiers):
        work.list_held()
    else:
        work.keep(order)
    return True


def _failure(command: StoreBlocks | LoadBlocks) -> BlocksKept | LoadEnded:
    """Return the answer to a command that could not be performed."""
    flags = (False,) * len(command.hashes)
    if isinstance(command, StoreBlocks):
        return BlocksKept(command.number, flags)
    return LoadEnded(command.request_id, command.number, flags)


def kv_blocks(pools: Collection[HostPool]) -> list[tuple[str, HostView]]:
    """Return the block counts of every arena, spill space and tier: pairs of a name and a view.

    The name of an arena is `host`, that of a spill space is `spill`.

    A tier that several hosts share is listed once, for the first of these hosts.
    """
    arenas = [(ARENA_TIER, pool.view()) for pool in pools]
    books: dict[int, tuple[HostId, Tier]] = {}
    for pool in pools:
        for tier in pool.tiers.tiers if pool.tiers is not None else ():
            books.setdefault(id(tier), (pool.host, tier))
    spills = [("spill", _blocks_of_spill(pool.spill, pool.host)) for pool in pools if pool.spill is not None]
    return [*arenas, *spills, *((tier.name, _blocks_of(tier, host)) for host, tier in books.values())]


def _blocks_of_spill(spill: SpillSpace, host: HostId) -> HostView:
    total, free = spill.rules.blocks, spill.free
    return HostView(id=host, blocks_total=total, blocks_free=free, blocks_used=total - free, blocks_cached=0)


def _blocks_of(tier: Tier, host: HostId) -> HostView:
    """Return a tier's block counts as a `HostView`. Blocks that are being written count as used.

    If the store itself decides how many blocks it keeps, the total is the number of known blocks, and none is free.
    """
    view = tier.view()
    return HostView(
        id=host,
        blocks_total=view.blocks_total,
        blocks_free=view.blocks_total - view.blocks_cached - view.blocks_writing,
        blocks_used=view.blocks_writing,
        blocks_cached=view.blocks_cached,
    )
