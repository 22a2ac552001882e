"""The tiers below the arena of the server's own host: stores, and the threads that move blocks to and from them.

Bytes go through memory of their own, never straight between arena and store: so a store that hangs can be answered for
after `ANSWER_S`, and what it still does then touches no block. No request waits longer than that for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import msgspec
import numpy as np

from baton.control.keeping import Keeping
from baton.core.config import TierConfig
from baton.core.errors import ConfigError, StoreError
from baton.core.keeping import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.types import HostId, HostView
from baton.host.build import Computing
from baton.kv.blocks import EvictionOrder
from baton.kv.host_pool import HostPool
from baton.kv.identity import KVIdentity
from baton.kv.tier import Tier, TierRules
from baton.metrics.catalog import TIER_BLOCKS
from baton.metrics.registry import Metrics
from baton.server.clock import now_s
from baton.store.opening import open_store
from baton.store.port import Store

log = logging.getLogger("baton.server")

ANSWER_S = 5.0
"""A store that has not answered for so long is answered for: nothing was kept, nothing was read."""
_THREADS = 4
_PLACES_DEFAULT = 1_000_000
"""Blocks that are remembered of a store whose other side decides how many it keeps."""


@dataclass(slots=True)
class OpenTier:
    """A tier with its store."""

    name: str
    rules: TierRules
    store: Store


@dataclass(slots=True)
class _Work:
    """One write or read. Whoever touches the arena for it holds the lock, and does not once it is closed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def close(self) -> bool:
        """End it. False where it has ended before."""
        with self.lock:
            was_closed, self.closed = self.closed, True
        return not was_closed


@dataclass(slots=True)
class _Load:
    """One read, of which each tier has a part."""

    command: LoadBlocks
    work: _Work
    end: Callable[[Sequence[bool]], None]
    whole: list[bool]
    waiting: int
    """Tiers that have not answered. Guarded by the work's lock, as `whole` is."""
    began_s: float
    took_s: dict[str, float] = field(default_factory=dict[str, float])
    """Of those that have answered."""


class LiveTiers:
    """Carries out what the pool wants of its tiers. Called on the event loop; answers come there too."""

    def __init__(self, tiers: Sequence[OpenTier], memory: memoryview, block_bytes: int) -> None:
        self.tiers = tuple(tiers)
        self._keeping: Keeping | None = None
        self._metrics = Metrics()
        self._damaged = 0
        self._loads: dict[int, _Load] = {}
        """Reads that are not over."""
        self._stores = {tier.name: tier.store for tier in tiers}
        self._arena = np.frombuffer(memory, np.uint8).reshape(-1, block_bytes)  # [blocks, bytes]
        self._threads = {tier.name: ThreadPoolExecutor(_THREADS, thread_name_prefix=tier.name) for tier in tiers}
        """Of each its own: a store that hangs holds up no other."""

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """See `Outside.keep`."""
        match command:
            case DropBlocks(tier=tier, hashes=hashes):
                self._threads[tier].submit(self._stores[tier].drop, hashes)
            case StoreBlocks():
                end = self._begin(command, len(command.hashes), self._told_kept)
                self._threads[command.tier].submit(self._put, command, *end)
            case LoadBlocks():
                work, end = self._begin(command, len(command.hashes), self._told_loaded)
                names = tuple(dict.fromkeys(command.tiers))
                load = _Load(command, work, end, [False] * len(command.hashes), len(names), now_s())
                self._loads[command.number] = load
                for name in names:
                    self._threads[name].submit(self._get, load, name)

    def answer(self, host: HostId, keeping: Keeping, metrics: Metrics) -> None:
        """Tell from now on how writes and reads have ended, and first what earlier runs have left."""
        self._keeping, self._metrics = keeping, metrics
        for tier in self.tiers:
            try:
                keeping.opened(host, tier.name, tier.store.held(), now_s())
            except StoreError as error:
                log.warning("tier %s: %s; it begins as if it were empty", tier.name, error)

    def close(self) -> None:
        """Let writes that have begun end, forget the others, and let go of stores and arena."""
        self._keeping = None
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        for tier in self.tiers:
            tier.store.close()
        self._arena = self._arena[:0].copy()

    def _begin(
        self,
        command: StoreBlocks | LoadBlocks,
        blocks: int,
        tell: Callable[[StoreBlocks | LoadBlocks, Sequence[bool]], None],
    ) -> tuple[_Work, Callable[[Sequence[bool]], None]]:
        """Set the limit of a write or a read. Returns it, and what a thread calls at its end."""
        loop, work = asyncio.get_running_loop(), _Work()

        def end(flags: Sequence[bool]) -> None:
            if work.close():
                timer.cancel()
                tell(command, flags)

        timer = loop.call_later(ANSWER_S, end, (False,) * blocks)
        return work, lambda flags: _call_on(loop, end, flags)

    def _told_kept(self, command: StoreBlocks | LoadBlocks, flags: Sequence[bool]) -> None:
        if self._keeping is None or not isinstance(command, StoreBlocks):
            return
        self._count(command.host, command.tier, "stored", sum(flags))
        self._count(command.host, command.tier, "refused", len(flags) - sum(flags))
        self._keeping.kept(command, flags, now_s())

    def _told_loaded(self, command: StoreBlocks | LoadBlocks, flags: Sequence[bool]) -> None:
        if self._keeping is None or not isinstance(command, LoadBlocks):
            return
        for tier, is_whole in zip(command.tiers, flags, strict=True):
            self._count(command.host, tier, "loaded" if is_whole else "missed", 1)
        damaged = sum(tier.store.counters.damaged for tier in self.tiers)
        self._count(command.host, command.tiers[0], "damaged", damaged - self._damaged)
        self._damaged = damaged
        load = self._loads.pop(command.number)
        late_s = now_s() - load.began_s
        took_s = {tier: load.took_s.get(tier, late_s) for tier in command.tiers}
        self._keeping.loaded(command, flags, took_s, now_s())

    def _count(self, host: HostId, tier: str, what: str, blocks: int) -> None:
        self._metrics.count(TIER_BLOCKS, host, tier, what, amount=blocks)

    # ---- in a thread

    def _put(self, command: StoreBlocks, work: _Work, end: Callable[[Sequence[bool]], None]) -> None:
        with work.lock:
            if work.closed:
                return
            copies = self._arena[list(command.blocks)]  # [blocks, bytes], of its own
        pairs = [(name, memoryview(copies[place])) for place, name in enumerate(command.hashes)]
        end(_asked(partial(self._stores[command.tier].put, pairs), len(pairs)))

    def _get(self, load: _Load, tier: str) -> None:
        """Read what this tier has of a load. The one that comes last tells of all."""
        command = load.command
        places = [place for place, name in enumerate(command.tiers) if name == tier]
        read = np.empty((len(places), self._arena.shape[1]), np.uint8)  # [blocks, bytes]
        pairs = [(command.hashes[place], memoryview(read[row])) for row, place in enumerate(places)]
        answered = _asked(partial(self._stores[tier].get, pairs), len(pairs))
        good = [row for row, is_whole in enumerate(answered) if is_whole]
        with load.work.lock:
            if load.work.closed:
                return
            self._arena[[command.write[places[row]] for row in good]] = read[good]
            for row in good:
                load.whole[places[row]] = True
            load.took_s[tier] = now_s() - load.began_s
            load.waiting -= 1
            is_last = load.waiting == 0
        if is_last:
            load.end(load.whole)


def _asked(ask: Callable[[], list[bool]], blocks: int) -> list[bool]:
    """Ask a store. One that fails altogether has done nothing."""
    try:
        return ask()
    except (StoreError, OSError):
        return [False] * blocks


def _call_on(loop: asyncio.AbstractEventLoop, end: Callable[[Sequence[bool]], None], flags: Sequence[bool]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(end, flags)


def open_tiers(configs: Sequence[TierConfig], computing: Computing, identity: KVIdentity) -> list[OpenTier]:
    """Open the stores of a configuration, for blocks of this model in this layout alone.

    Raises ConfigError with what is wrong with a URL, or where its store cannot be used.
    """
    block_bytes, fingerprint = computing.layout.block_bytes, _fingerprint(computing, identity)
    opened: list[OpenTier] = []
    for number, config in enumerate(configs):
        try:
            store = open_store(config.url, layout_fingerprint=fingerprint, block_bytes=block_bytes)
        except StoreError as error:
            raise ConfigError(f"tiers[{number}]: {error}") from error
        kind = config.url.partition(":")[0]
        name = kind if kind not in {tier.name for tier in opened} else f"{kind}-{number}"
        rules = TierRules(
            name=name,
            blocks_max=store.capacity_blocks or _PLACES_DEFAULT,
            latency_s=config.latency_s,
            block_load_s=block_bytes / config.bytes_per_s,
            when=config.when,
        )
        opened.append(OpenTier(name, rules, store))
    return opened


def _fingerprint(computing: Computing, identity: KVIdentity) -> str:
    """Name everything that bytes of a block depend on, but its tokens."""
    parts = (msgspec.structs.replace(identity, model=""), computing.layout, computing.dtype)
    return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def pool_tiers(opened: Sequence[OpenTier], eviction: Callable[[], EvictionOrder]) -> list[Tier]:
    """Make what a pool keeps about these tiers."""
    return [Tier(tier.rules, eviction) for tier in opened]


def blocks_below(pool: HostPool) -> list[tuple[str, HostView]]:
    """Count the blocks of each tier by state, as an arena's are counted: what is being written is used."""
    tiers = pool.tiers.tiers if pool.tiers is not None else ()
    return [
        (
            view.tier,
            HostView(
                id=pool.host,
                blocks_total=view.blocks_total,
                blocks_free=view.blocks_total - view.blocks_cached - view.blocks_writing,
                blocks_used=view.blocks_writing,
                blocks_cached=view.blocks_cached,
            ),
        )
        for view in (tier.view() for tier in tiers)
    ]
