"""Stores of simulated tiers: they take time, fill up, break, lose and damage blocks, and outlive their host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.core.tier_messages import BlocksKept, DropBlocks, LoadBlocks, LoadEnded, StoreBlocks, TierNews
from baton.core.types import BlockHash, BlockId, HostId
from baton.decide.kv.tier import TierRules
from baton.lab.sim.engines import SimEngine
from baton.lab.sim.faults import StoreTrouble
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.spec import SimTier

SLOWDOWN = 10.0
"""Times as long that a slow store takes."""
KV = tuple[bytes, ...]
"""Of a block, token by token."""


@dataclass(slots=True, kw_only=True)
class SimStore:
    """One tier's bytes, by name. A block that was damaged is noticed when it is read, as a checksum would."""

    latency_s: float
    block_s: float
    """What each block adds."""
    block_tokens: int
    blocks: dict[BlockHash, KV] = field(default_factory=dict[BlockHash, KV])
    damaged: set[BlockHash] = field(default_factory=set[BlockHash])
    troubles: list[StoreTrouble] = field(default_factory=list[StoreTrouble])
    """What ails it now, once for each fault that lasts: `full`, `down`, `slow`."""
    answer_s: float = 5.0
    """See `SimTier`."""
    line_block_s: float = 0.0
    """What each block takes on the way of a host to it, where that is narrower."""
    busy_until_s: float = 0.0
    lines_busy_until_s: dict[HostId, float] = field(default_factory=dict[HostId, float])

    def begin(self, host: HostId, blocks: int, now_s: float) -> float | None:
        """Begin a write or a read. Returns when it ends; None: not in time, and then it is not begun.

        The store and the host's way to it each do one thing after the other: a host that waits for its link
        delays no other host.
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
        """How long a write or a read of so many blocks takes, alone."""
        alone_s = self.latency_s + blocks * self.block_s
        return alone_s * SLOWDOWN if "slow" in self.troubles else alone_s

    def put(self, name: BlockHash, kv: KV) -> bool:
        if "full" in self.troubles or "down" in self.troubles:
            return False
        self.blocks[name] = kv
        self.damaged.discard(name)
        return True

    def get(self, name: BlockHash) -> KV | None:
        """Return the block's bytes; None where it is gone or damaged."""
        return None if "down" in self.troubles or name in self.damaged else self.blocks.get(name)

    def drop(self, names: Sequence[BlockHash]) -> None:
        for name in names:
            self.blocks.pop(name, None)
            self.damaged.discard(name)

    def damage(self, every: int) -> None:
        """Flip a bit in one block of so many."""
        self.damaged.update(list(self.blocks)[::every])


@dataclass(slots=True, kw_only=True)
class Stores:
    """Carries out what pools want of their tiers, on virtual time. One thing at a time per store."""

    loop: EventLoop
    engine: Callable[[HostId], SimEngine | None]
    """Of a host; None while it is down."""
    ended: Callable[[HostId, TierNews], None]
    """Called with the end of every write and read of a host."""
    by_place: dict[tuple[HostId, str], SimStore] = field(default_factory=dict[tuple[HostId, str], SimStore])
    """The store of each host and tier. Several may name one object."""
    shared: dict[tuple[str, int], SimStore] = field(default_factory=dict[tuple[str, int], SimStore])
    """Stores of all hosts whose blocks have one size, by name and size."""
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

    def below(self, host: HostId, tiers: Sequence[SimTier], block_tokens: int) -> tuple[TierRules, ...]:
        """Open the stores of a host. They still have the blocks from before."""
        return tuple(self._open(host, made, block_tokens) for made in tiers)

    def _open(self, host: HostId, made: SimTier, block_tokens: int) -> TierRules:
        rules, place = made.rules(block_tokens), (host, made.name)
        if made.shared:
            key = (made.name, block_tokens)
            if key not in self.shared:
                self.shared[key] = _store(rules, made, block_tokens)
            self.by_place[place] = self.shared[key]
        elif place not in self.by_place:
            self.by_place[place] = _store(rules, made, block_tokens)
        return rules

    def left(self, host: HostId, made: SimTier) -> tuple[BlockHash, ...]:
        """List what a host's own store has from before, oldest first."""
        return () if made.shared else tuple(self.by_place[host, made.name].blocks)

    def perform(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """Begin a write or a read, whose end is told later, or forget blocks."""
        match command:
            case StoreBlocks():
                self._writes.append(command)
                store = self.by_place[command.host, command.tier]
                took_s, in_time = self._work(command.host, command.tier, len(command.hashes))
                self.loop.after(took_s, partial(self._write, command, store, in_time))
            case LoadBlocks():
                self._reads[command.number] = command
                self._begin_read(command)
            case DropBlocks():
                self.by_place[command.host, command.tier].drop(command.hashes)

    def lose_host(self, host: HostId) -> None:
        """Its writes and reads are over. What its stores have is there when it comes back."""
        self._writes = [write for write in self._writes if write.host != host]
        for load in [load for load in self._reads.values() if load.host == host]:
            self._end_read(load, [False] * len(load.hashes), {})

    def break_store(self, host: HostId, tier: str, what: StoreTrouble) -> None:
        """See `StoreFault`."""
        store = self.by_place[host, tier]
        match what:
            case "full" | "down" | "slow":
                store.troubles.append(what)
            case "damaged":
                store.damage(every=2)
            case "lost":
                store.blocks.clear()

    def mend_store(self, host: HostId, tier: str, what: StoreTrouble) -> None:
        """End one lasting trouble. Damaged and lost blocks stay so."""
        troubles = self.by_place[host, tier].troubles
        if what in troubles:
            troubles.remove(what)

    def _work(self, host: HostId, tier: str, blocks: int) -> tuple[float, bool]:
        """Give a store something to do. Returns how long that takes, or is waited for, and whether it ends in time."""
        now_s, store = self.loop.now_s, self.by_place[host, tier]
        end_s = store.begin(host, blocks, now_s)
        return (store.answer_s, False) if end_s is None else (end_s - now_s, True)

    def _begin_read(self, command: LoadBlocks) -> None:
        """Have all tiers read side by side. It ends with the slowest."""
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
            return  # the host is down, or was: nothing of the write is there
        self._writes = [write for write in self._writes if write is not command]
        pairs = zip(command.hashes, command.blocks, strict=True)
        kept = [in_time and store.put(name, _read_block(engine, block, store.block_tokens)) for name, block in pairs]
        self.ended(command.host, BlocksKept(command.number, tuple(kept)))

    def _read(self, command: LoadBlocks, took_s: dict[str, float], late: set[str]) -> None:
        engine = self.engine(command.host)
        if engine is None or self._reads.get(command.number) is not command:
            return  # the host is down: the read ends when that is noticed
        whole: list[bool] = []
        for tier, name, block in zip(command.tiers, command.hashes, command.write, strict=True):
            store = self.by_place[command.host, tier]
            kv = None if tier in late else store.get(name)
            there = kv or [_garbage(old) for old in _read_block(engine, block, store.block_tokens)]
            for slot, token_kv in enumerate(there):
                engine.write((block,), slot, token_kv)
            whole.append(kv is not None)
        self._end_read(command, whole, took_s)

    def _end_read(self, command: LoadBlocks, whole: Sequence[bool], took_s: dict[str, float]) -> None:
        del self._reads[command.number]
        self.ended(command.host, LoadEnded(command.request_id, command.number, tuple(whole), took_s))


def _store(rules: TierRules, made: SimTier, block_tokens: int) -> SimStore:
    return SimStore(
        latency_s=rules.latency_s,
        block_s=block_tokens * made.token_bytes / made.bytes_per_s,
        line_block_s=rules.block_load_s,
        block_tokens=block_tokens,
        answer_s=made.answer_s,
    )


def _read_block(engine: SimEngine, block: BlockId, block_tokens: int) -> KV:
    return tuple(engine.kv_of((block,), slot) for slot in range(block_tokens))


def _garbage(kv: bytes) -> bytes:
    """What lies where a block could not be read."""
    return bytes(0xAA for _ in kv)
