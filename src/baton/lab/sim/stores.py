"""Stores of simulated tiers: reads and writes take virtual time and can fail. Blocks outlive their host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.core.tier_messages import BlocksKept, DropBlocks, LoadBlocks, LoadEnded, StoreBlocks, StoreEvent
from baton.core.types import BlockHash, BlockId, HostId
from baton.decide.kv.tier import TierRules
from baton.lab.sim.engines import SimEngine
from baton.lab.sim.faults import StoreTrouble
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.spec import SimTier

SLOWDOWN = 10.0
"""Factor of the duration of reads and writes of a slow store."""
KV = tuple[bytes, ...]
"""KV of one block: one entry per token."""


@dataclass(slots=True, kw_only=True)
class SimStore:
    """The blocks of one tier by hash. A damaged block fails when it is read, like a block with a wrong checksum."""

    latency_s: float
    block_s: float
    """Time per block."""
    block_tokens: int
    blocks: dict[BlockHash, KV] = field(default_factory=dict[BlockHash, KV])
    damaged: set[BlockHash] = field(default_factory=set[BlockHash])
    troubles: list[StoreTrouble] = field(default_factory=list[StoreTrouble])
    """Active faults: `full`, `down` or `slow`, each at most once."""
    answer_s: float = 5.0
    """Timeout of a read or write."""
    line_block_s: float = 0.0
    """Time per block on one host's link to the store."""
    busy_until_s: float = 0.0
    lines_busy_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])

    def begin(self, host: HostId, blocks: int, now_s: float) -> float | None:
        """Begin a write or read and return its end. If it would exceed the timeout, return None and do not begin it.

        The store and each host's link to it are separate FIFO queues, so that a host that waits for its link does not
        delay other hosts.
        """
        store_s = max(now_s, self.busy_until_s) + self.work_s(blocks)
        way_s = self.latency_s + blocks * self.line_block_s
        line_s = max(now_s, self.lines_busy_until_s.get(host, 0.0)) + way_s
        end_s = max(store_s, line_s)
        if end_s > now_s + self.answer_s:
            return None
        self.busy_until_s, self.lines_busy_until_s[host] = store_s, line_s
        return end_s

    def work_s(self, blocks: int) -> float:
        """Return the duration of a write or read of this many blocks, without queueing."""
        alone_s = self.latency_s + blocks * self.block_s
        return alone_s * SLOWDOWN if "slow" in self.troubles else alone_s

    def put(self, block_hash: BlockHash, kv: KV) -> bool:
        if "full" in self.troubles or "down" in self.troubles:
            return False
        self.blocks[block_hash] = kv
        self.damaged.discard(block_hash)
        return True

    def get(self, block_hash: BlockHash) -> KV | None:
        """Return the block's bytes, or None if it is gone or damaged, or the store is down."""
        return None if "down" in self.troubles or block_hash in self.damaged else self.blocks.get(block_hash)

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self.blocks.pop(block_hash, None)
            self.damaged.discard(block_hash)

    def damage(self, every: int) -> None:
        """Damage every nth block."""
        self.damaged.update(list(self.blocks)[::every])


@dataclass(slots=True, kw_only=True)
class Stores:
    """Performs the tier commands of host pools on virtual time. Each store performs one read or write at a time."""

    loop: EventLoop
    engine: Callable[[HostId], SimEngine | None]
    """Returns a host's engine, or None while the host is down."""
    ended: Callable[[HostId, StoreEvent], None]
    """Called with the end of every write and read of a host."""
    by_host_tier: dict[tuple[HostId, str], SimStore] = field(default_factory=dict[tuple[HostId, str], SimStore])
    """The store of each host and tier. Hosts with a shared tier have the same object."""
    shared: dict[tuple[str, int], SimStore] = field(default_factory=dict[tuple[str, int], SimStore])
    """Shared stores, by tier name and block size in tokens."""
    _reads: dict[int, LoadBlocks] = field(default_factory=dict[int, LoadBlocks])
    _writes: list[StoreBlocks] = field(default_factory=list[StoreBlocks])

    @property
    def reading(self) -> tuple[LoadBlocks, ...]:
        """Reads that have begun and not ended."""
        return tuple(self._reads.values())

    @property
    def writing(self) -> tuple[StoreBlocks, ...]:
        """Writes that have begun and not ended."""
        return tuple(self._writes)

    def open_tiers(self, host: HostId, tiers: Sequence[SimTier], block_tokens: int) -> tuple[TierRules, ...]:
        """Open the stores of a host and return their rules. A reopened store still has its blocks."""
        return tuple(self._open(host, tier, block_tokens) for tier in tiers)

    def _open(self, host: HostId, tier: SimTier, block_tokens: int) -> TierRules:
        rules, host_tier = tier.rules(block_tokens), (host, tier.name)
        if tier.shared:
            key = (tier.name, block_tokens)
            if key not in self.shared:
                self.shared[key] = _store(rules, tier, block_tokens)
            self.by_host_tier[host_tier] = self.shared[key]
        elif host_tier not in self.by_host_tier:
            self.by_host_tier[host_tier] = _store(rules, tier, block_tokens)
        return rules

    def held_hashes(self, host: HostId, tier: SimTier) -> tuple[BlockHash, ...]:
        """Return the blocks that a host's own store already holds, oldest first. A shared store returns none."""
        return () if tier.shared else tuple(self.by_host_tier[host, tier.name].blocks)

    def perform(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Begin a write or read, whose end `ended` reports, or drop blocks."""
        match command:
            case StoreBlocks():
                self._writes.append(command)
                store = self.by_host_tier[command.host, command.tier]
                took_s, in_time = self._work(command.host, command.tier, len(command.hashes))
                self.loop.after(took_s, partial(self._write, command, store, in_time))
            case LoadBlocks():
                self._reads[command.number] = command
                self._begin_read(command)
            case DropBlocks():
                self.by_host_tier[command.host, command.tier].drop(command.hashes)

    def lose_host(self, host: HostId) -> None:
        """Abort the writes and reads of a host that is down. Its stores keep their blocks."""
        self._writes = [write for write in self._writes if write.host != host]
        for load in [load for load in self._reads.values() if load.host == host]:
            self._end_read(load, [False] * len(load.hashes), {})

    def break_store(self, host: HostId, tier: str, what: StoreTrouble) -> None:
        """Begin a `StoreFault`."""
        store = self.by_host_tier[host, tier]
        match what:
            case "full" | "down" | "slow":
                store.troubles.append(what)
            case "damaged":
                store.damage(every=2)
            case "lost":
                store.blocks.clear()

    def mend_store(self, host: HostId, tier: str, what: StoreTrouble) -> None:
        """End a `StoreFault`. Damaged and lost blocks do not recover."""
        troubles = self.by_host_tier[host, tier].troubles
        if what in troubles:
            troubles.remove(what)

    def _work(self, host: HostId, tier: str, blocks: int) -> tuple[float, bool]:
        """Begin work on a store. Return (seconds until it ends or times out, whether it ends in time)."""
        now_s, store = self.loop.now_s, self.by_host_tier[host, tier]
        end_s = store.begin(host, blocks, now_s)
        return (store.answer_s, False) if end_s is None else (end_s - now_s, True)

    def _begin_read(self, command: LoadBlocks) -> None:
        """Begin a read from all its tiers in parallel. It ends with the slowest tier."""
        took_s: dict[str, float] = {}
        late: set[str] = set()
        for tier, blocks in Counter(command.tiers).items():
            took_s[tier], in_time = self._work(command.host, tier, blocks)
            if not in_time:
                late.add(tier)
        self.loop.after(max(took_s.values()), partial(self._read, command, took_s, late))

    def _write(self, command: StoreBlocks, store: SimStore, in_time: bool) -> None:  # noqa: FBT001  what ends a write
        engine = self.engine(command.host)
        if engine is None or not any(write is command for write in self._writes):
            return  # the host is or was down, so the write was aborted
        self._writes = [write for write in self._writes if write is not command]
        pairs = zip(command.hashes, command.blocks, strict=True)
        kept = [in_time and store.put(each, _read_block(engine, block, store.block_tokens)) for each, block in pairs]
        self.ended(command.host, BlocksKept(command.number, tuple(kept)))

    def _read(self, command: LoadBlocks, took_s: dict[str, float], late: set[str]) -> None:
        engine = self.engine(command.host)
        if engine is None or self._reads.get(command.number) is not command:
            return  # the host is down: `lose_host` ends the read
        whole: list[bool] = []
        for tier, block_hash, block in zip(command.tiers, command.hashes, command.write, strict=True):
            store = self.by_host_tier[command.host, tier]
            kv = None if tier in late else store.get(block_hash)
            there = kv or [_garbage(old) for old in _read_block(engine, block, store.block_tokens)]
            for slot, token_kv in enumerate(there):
                engine.write((block,), slot, token_kv)
            whole.append(kv is not None)
        self._end_read(command, whole, took_s)

    def _end_read(self, command: LoadBlocks, whole: Sequence[bool], took_s: dict[str, float]) -> None:
        del self._reads[command.number]
        self.ended(command.host, LoadEnded(command.request_id, command.number, tuple(whole), took_s))


def _store(rules: TierRules, tier: SimTier, block_tokens: int) -> SimStore:
    return SimStore(
        latency_s=rules.latency_s,
        block_s=block_tokens * tier.token_bytes / tier.bytes_per_s,
        line_block_s=rules.block_load_s,
        block_tokens=block_tokens,
        answer_s=tier.answer_s,
    )


def _read_block(engine: SimEngine, block: BlockId, block_tokens: int) -> KV:
    return tuple(engine.kv_of((block,), slot) for slot in range(block_tokens))


def _garbage(kv: bytes) -> bytes:
    """Return garbage bytes, which a failed read leaves in the arena."""
    return bytes(0xAA for _ in kv)
