"""The tiers below one host's arena: writes, reads and evictions.

This is a part of the host pool. Cached blocks are written to every tier that lacks them, and stay in the arena during
the write. The metadata of a tier is a hint: a block that is missing or damaged when it is read counts as a miss and is
removed from the metadata.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from baton.core.kv_config import Preemption
from baton.core.tier_messages import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    LoadWanted,
    PutWanted,
    StoreBlocks,
    TierCommand,
    TierEvent,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.types import BlockHash, BlockId, HostId
from baton.decide.kv.blocks import BlockFacts, Blocks, EvictionOrder
from baton.decide.kv.puts import BlockQueue, Puts
from baton.decide.kv.tier import Tier, tier_named
from baton.decide.kv.window import Window

ARENA_PARTS = 8
"""Writes to each tier pin at most 1/8 of the arena."""


class BackedBlocksFirst:
    """Evict blocks that a tier holds before blocks without a copy; within each group in the inner order."""

    def __init__(self, backed: EvictionOrder, only: EvictionOrder) -> None:
        """`backed`, `only`: the inner orders of blocks with and without a copy."""
        self._backed, self._only = backed, only
        self._order_of: dict[BlockId, EvictionOrder] = {}

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        order = self._order_of[block] = self._backed if facts.is_backed else self._only
        order.add(block, facts)

    def remove(self, block: BlockId) -> None:
        self._order_of.pop(block).remove(block)

    def pop(self) -> BlockId:
        block = (self._backed if len(self._backed) else self._only).pop()
        del self._order_of[block]
        return block

    def __len__(self) -> int:
        return len(self._order_of)


@dataclass(frozen=True, slots=True)
class _Write:
    tier: Tier
    hashes: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    slots: tuple[BlockId, ...]
    """Places in the tier."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a read that one tier serves."""

    tier: Tier
    indices: tuple[int, ...]
    """Indices of its blocks in the whole read."""
    slots: tuple[BlockId, ...]
    behind: int
    """Number of blocks in all reads of the tier when this read started, its own included."""


@dataclass(frozen=True, slots=True)
class ReadablePrefix:
    """A prefix that the arena will hold after a read of tiers."""

    blocks: int
    """Number of leading blocks, including those in the arena."""
    load_s: float
    """Predicted duration of the read."""


@dataclass(slots=True, kw_only=True)
class Tiers:
    """All tiers of one host, the fastest first."""

    host: HostId
    arena: Blocks
    tiers: Sequence[Tier]
    block_tokens: int = 1
    window: Window | None = None
    """Attention window of the model. None: no window."""
    preemption: Preemption = "cheaper"
    """How preempted requests restore their KV."""
    resting: set[str] = field(default_factory=set[str])
    """Tiers that this host does not read or write for now (circuit breaker). Other hosts may still use them."""
    _waiting: dict[str, BlockQueue] = field(default_factory=dict[str, BlockQueue])
    """Blocks to write, by tier, in the order in which they became cached. A request's deepest block comes first, so
    that its first blocks are evicted last, in the arena and in the tier."""
    _puts: Puts = field(init=False)
    """Urgent writes, and the requests that wait for them."""
    _writes: dict[int, _Write] = field(default_factory=dict[int, _Write])
    _loads: dict[int, list[_Part]] = field(default_factory=dict[int, list[_Part]])
    _begun: int = 0

    def __post_init__(self) -> None:
        self.arena.fresh = []
        at_once = any(tier.rules.when == "sealed" for tier in self.tiers)
        self.arena.fresh_when = "sealed" if at_once else "cached"
        self._waiting = {tier.name: OrderedDict() for tier in self.tiers}
        self._puts = Puts(self.arena.total)

    def handle(self, event: TierEvent) -> list[TierCommand]:
        """Apply one event and return the commands. Results of unknown reads and writes are ignored."""
        match event:
            case BlocksKept():
                self._end_write(event)
                return []
            case LoadWanted():
                return [self._load(event)]
            case LoadEnded():
                return self._end_load(event)
            case PutWanted():
                self._put(event)
                return []
            case TierOpened():
                return self._open(event)
            case TierShrunk():
                return self._shrink(event)
            case TierRests(tier=name, rests=rests):
                (self.resting.add if rests else self.resting.discard)(name)
                return []

    def _shrink(self, event: TierShrunk) -> list[TierCommand]:
        tier = tier_named(self.tiers, event.tier)
        return [] if tier is None else self._drop(tier, tier.shrink(event.blocks_max))

    @property
    def fastest(self) -> Tier | None:
        """The fastest tier that is not resting."""
        return next((tier for tier in self.tiers if tier.name not in self.resting), None)

    @property
    def shared(self) -> Tier | None:
        """The fastest tier that other hosts share and that is not resting."""
        return next((tier for tier in self.tiers if tier.rules.shared_as and tier.name not in self.resting), None)

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether a tier can serve the block."""
        return any(tier.has(block_hash) for tier in self.tiers)

    def find(self, hashes: Iterable[BlockHash]) -> list[Tier]:
        """Return the fastest tier that can serve each block, for the longest leading run that tiers can serve."""
        found: list[Tier] = []
        for block_hash in hashes:
            tier = next((tier for tier in self.tiers if tier.name not in self.resting and tier.has(block_hash)), None)
            if tier is None:
                break
            found.append(tier)
        return found

    def held_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that the arena holds or that are behind the window."""
        return self.arena.hit(hashes, self.window, self.block_tokens).count

    def reach(self, hashes: Sequence[BlockHash]) -> list[ReadablePrefix]:
        """Return the prefixes that reads can make available beyond the arena, the shortest first.

        There is one per run of blocks in the same tier. Tiers are read in parallel; a read that is too long is cut.
        """
        blocks, load_s = self.held_blocks(hashes), 0.0
        asked: Counter[str] = Counter()
        found: list[ReadablePrefix] = []
        for tier, run in groupby(self.find(hashes[blocks:]), key=lambda tier: tier):
            wanted = sum(1 for _ in run)
            count = min(wanted, tier.readable_blocks - asked[tier.name])
            if count <= 0:
                break
            asked[tier.name] += count
            blocks += count
            load_s = max(load_s, tier.speed.load_s(tier.loading + asked[tier.name]))
            found.append(ReadablePrefix(blocks, load_s))
            if count < wanted:
                break
        return found

    def decline(self, hashes: Sequence[BlockHash]) -> None:
        """Record that a prompt is recomputed although a tier may hold a part of it."""
        held = self.held_blocks(hashes)
        for tier in self.find(hashes[held : held + 1]):
            tier.speed.doubt()

    def pinned(self) -> Iterable[BlockId]:
        """Return the arena blocks in current writes, once per write."""
        return (block for write in self._writes.values() for block in write.blocks)

    def write_back(self) -> list[TierCommand]:
        """Start writes of newly cached and waiting blocks, up to the limits, and return the commands."""
        fresh, self.arena.fresh = self.arena.fresh or [], []
        for block in fresh:
            facts = self.arena.facts(block)
            if facts is not None:
                self._note(block, facts.block_hash)
        commands = [command for tier in self.tiers for command in self._write_to(tier)]
        return [*commands, *self._puts.ended()]

    def shared_with(self, other: Tiers) -> Tier | None:
        """Return the fastest tier that both hosts share and can reach: blocks put by one can be read by the other."""
        resting = self.resting | other.resting
        shared = [tier for tier in self.tiers if tier.rules.shared_as and tier in other.tiers]
        return next((tier for tier in shared if tier.name not in resting), None)

    def abandon(self) -> None:
        """End all reads and writes of a host that has left. Its unfinished writes to shared tiers count as failed."""
        for write in self._writes.values():
            write.tier.end_write(write.hashes, write.slots, [False] * len(write.slots))
        for part in [part for parts in self._loads.values() for part in parts]:
            part.tier.end_load(part.slots, [True] * len(part.slots))
        self._writes.clear()
        self._loads.clear()
        self._puts.clear()

    def _put(self, event: PutWanted) -> None:
        """Queue urgent writes, except for blocks that are already being written to the tier."""
        tier = tier_named(self.tiers, event.tier)
        assert tier is not None, f"blocks are to be put into {event.tier}, which {self.host} does not have"
        writing = {block_hash for write in self._writes.values() if write.tier is tier for block_hash in write.hashes}
        left: set[BlockHash] = set()
        for block_hash in event.hashes:
            block = self.arena.find(block_hash)
            if tier.knows(block_hash):
                tier.touch(block_hash)
            elif block is not None:
                self._waiting[tier.name].pop(block_hash, None)
                self._puts.urgent(tier.name)[block_hash] = block
                self._puts.run_blocks[tier.name] = max(1, event.run_blocks)
                left.add(block_hash)
            if block_hash in writing:
                left.add(block_hash)
        if event.number is not None:
            self._puts.wait(event.number, event.request_id, tier.name, left)
        tier.skipped += self._puts.trim(tier.name)

    def _note(self, block: BlockId, block_hash: BlockHash) -> None:
        for tier in self.tiers:
            if tier.knows(block_hash):
                tier.touch(block_hash)
                continue
            waiting = self._waiting[tier.name]
            waiting[block_hash] = block
            if len(waiting) > tier.rules.waiting_blocks_max:
                waiting.popitem(last=False)
                tier.skipped += 1

    def _write_to(self, tier: Tier) -> list[TierCommand]:
        commands: list[TierCommand] = []
        rules = tier.rules
        if tier.name in self.resting:  # blocks stay queued, but requests must not wait for a resting tier
            self._puts.rest(tier.name)
            return []
        room = min(rules.writing_blocks_max, max(1, self.arena.total // ARENA_PARTS)) - self._writing_to(tier)
        while room > 0 and (queue := self._puts.urgent(tier.name) or self._waiting[tier.name]):
            most = min(rules.batch_blocks, room, len(queue))
            if queue is self._puts.urgent(tier.name):
                most = min(most, self._puts.run_blocks[tier.name])
            batch = [queue.popitem(last=False) for _ in range(most)]
            begun = self._writing_to(tier)
            commands += self._begin_write(tier, batch)
            room -= self._writing_to(tier) - begun
        return commands

    def _writing_to(self, tier: Tier) -> int:
        """Return the number of blocks that this host is writing to a tier. Writes of other hosts are not known here."""
        return sum(len(write.hashes) for write in self._writes.values() if write.tier is tier)

    def _begin_write(self, tier: Tier, wanted: Sequence[tuple[BlockHash, BlockId]]) -> list[TierCommand]:
        hashes: list[BlockHash] = []
        blocks: list[BlockId] = []
        slots: list[BlockId] = []
        gone: list[BlockHash] = []
        for block, facts in self._in_order(tier, wanted):
            begun = tier.begin_write(facts)
            if begun is None:
                tier.skipped += 1
                continue
            hashes.append(facts.block_hash)
            blocks.append(block)
            slots.append(begun[0])
            gone += begun[1]
        self._puts.settle(tier.name, {block_hash for block_hash, _ in wanted}.difference(hashes))
        commands = self._drop(tier, gone)
        if not hashes:
            return commands
        self.arena.pin(blocks, uses=0)
        self._begun += 1
        self._writes[self._begun] = _Write(tier, tuple(hashes), tuple(blocks), tuple(slots))
        return [*commands, StoreBlocks(self._begun, self.host, tier.name, tuple(hashes), tuple(blocks))]

    def _in_order(self, tier: Tier, wanted: Sequence[tuple[BlockHash, BlockId]]) -> list[tuple[BlockId, BlockFacts]]:
        """Return blocks by depth, the first blocks of prompts first, without evicted blocks and those in the tier."""
        found: list[tuple[BlockId, BlockFacts]] = []
        for block_hash, block in wanted:
            facts = self.arena.facts(block)
            if facts is not None and facts.block_hash == block_hash and not tier.knows(block_hash):
                found.append((block, facts))
        return sorted(found, key=lambda pair: pair[1].start_tokens)

    def _drop(self, tier: Tier, gone: Sequence[BlockHash]) -> list[TierCommand]:
        """Record that a tier has lost blocks."""
        if not gone:
            return []
        for block_hash in gone:
            self._update_backed(block_hash)
        return [DropBlocks(self.host, tier.name, tuple(gone))]

    def _update_backed(self, block_hash: BlockHash) -> None:
        """Clear `is_backed` of a block that a tier has lost, unless another tier has it."""
        block = self.arena.find(block_hash)
        facts = self.arena.facts(block) if block is not None else None
        if facts is not None:
            facts.is_backed = self.has(block_hash)

    def _end_write(self, event: BlocksKept) -> None:
        write = self._writes.pop(event.number, None)
        if write is None:
            return
        write.tier.end_write(write.hashes, write.slots, event.kept)
        if any(event.kept):
            self._puts.settle(write.tier.name, write.hashes)
        else:
            self._puts.fail(write.tier.name, write.hashes)
        for block, kept in zip(write.blocks, event.kept, strict=True):
            facts = self.arena.facts(block)
            if facts is not None and kept:
                facts.is_backed = True
        # Do not queue the blocks just written again: writes to a store that keeps nothing would never end.
        fresh = list(self.arena.fresh or [])
        self.arena.unpin(write.blocks)
        self.arena.fresh = fresh

    def _load(self, event: LoadWanted) -> LoadBlocks:
        found = self.find(event.hashes)
        parts: list[_Part] = []
        for tier in self.tiers:
            indices = tuple(index for index, holder in enumerate(found) if holder is tier)
            if indices:
                slots = tuple(tier.begin_load(event.hashes[index] for index in indices))
                parts.append(_Part(tier, indices, slots, tier.loading))
        if parts:
            self._loads[event.number] = parts
        return LoadBlocks(
            request_id=event.request_id,
            number=event.number,
            host=self.host,
            tiers=tuple(tier.name for tier in found),
            hashes=event.hashes[: len(found)],
            write=event.blocks[: len(found)],
            back=event.back,
        )

    def _end_load(self, event: LoadEnded) -> list[TierCommand]:
        commands: list[TierCommand] = []
        for part in self._loads.pop(event.number, []):
            whole, took_s = [event.whole[index] for index in part.indices], event.took_s.get(part.tier.name)
            lost = part.tier.end_load(part.slots, whole)
            # A miss returns at once, so it says nothing about the speed of the tier.
            if took_s is not None and (all(whole) or took_s > part.tier.speed.load_s(part.behind)):
                part.tier.speed.learn(part.behind, took_s)
            commands += self._drop(part.tier, lost)
        return commands

    def _open(self, event: TierOpened) -> list[TierCommand]:
        tier = tier_named(self.tiers, event.tier)
        return [] if tier is None else self._drop(tier, tier.fill(event.hashes))
