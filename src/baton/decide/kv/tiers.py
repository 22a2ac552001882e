"""The tiers below one host's arena: what is written to them and when, what they can serve, what was lost.

Part of the host's pool, which tells it what becomes cached and asks it what is there. Blocks that nobody uses any more
are written to every tier that lacks them; while that lasts they stay in the arena. What a tier says is a hint: a block
that is gone or damaged when it is read is a miss, and forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from baton.core.config import Preemption
from baton.core.keeping import (
    BlocksKept,
    DropBlocks,
    KeepingCommand,
    LoadBlocks,
    LoadEnded,
    LoadWanted,
    PutWanted,
    StoreBlocks,
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
"""At most one in so many blocks of the arena is kept for a write to each tier, however large the writes may be."""


class BackedBlocksFirst:
    """Give up blocks that a tier below has, before those that are nowhere else; among either in the inner order."""

    def __init__(self, inner: Callable[[], EvictionOrder]) -> None:
        self._backed, self._only = inner(), inner()
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
    names: tuple[BlockHash, ...]
    blocks: tuple[BlockId, ...]
    places: tuple[BlockId, ...]
    """Of the tier."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one load reads from one tier."""

    tier: Tier
    indices: tuple[int, ...]
    """Among the blocks of the load."""
    places: tuple[BlockId, ...]
    behind: int
    """Blocks that the tier was asked for before, and these."""


@dataclass(frozen=True, slots=True)
class ReadablePrefix:
    """How far a prompt can be read."""

    blocks: int
    """Leading ones, those in the arena included."""
    load_s: float


@dataclass(slots=True, kw_only=True)
class Tiers:
    """All tiers of one host, the fastest first."""

    host: HostId
    arena: Blocks
    tiers: Sequence[Tier]
    block_tokens: int = 1
    window: Window | None = None
    """How far back the model sees. None: to the first token."""
    preemption: Preemption = "cheaper"
    """How requests that give way get back what the arena loses of them."""
    resting: set[str] = field(default_factory=set[str])
    """Tiers whose stores are left alone by this host: nothing is written and nothing read. Others may reach them."""
    _waiting: dict[str, BlockQueue] = field(default_factory=dict[str, BlockQueue])
    """By tier: blocks that are to be written to it, in the order in which they became cached: of a request, deepest
    first. So its head is let go last, here and in the tier, and given up last."""
    _puts: Puts = field(init=False)
    """What is written before what waits, and who waits for that."""
    _writes: dict[int, _Write] = field(default_factory=dict[int, _Write])
    _loads: dict[int, list[_Part]] = field(default_factory=dict[int, list[_Part]])
    _begun: int = 0

    def __post_init__(self) -> None:
        self.arena.fresh = []
        at_once = any(tier.rules.when == "sealed" for tier in self.tiers)
        self.arena.fresh_when = "sealed" if at_once else "cached"
        self._waiting = {tier.name: OrderedDict() for tier in self.tiers}
        self._puts = Puts(self.arena.total)

    def handle(self, event: TierEvent) -> list[KeepingCommand]:
        """Apply one event. Answers to what is not under way change nothing."""
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

    def _shrink(self, event: TierShrunk) -> list[KeepingCommand]:
        tier = tier_named(self.tiers, event.tier)
        return [] if tier is None else self._drop(tier, tier.shrink(event.blocks_max))

    @property
    def fastest(self) -> Tier | None:
        """The fastest tier that is not left alone."""
        return next((tier for tier in self.tiers if tier.name not in self.resting), None)

    def has(self, name: BlockHash) -> bool:
        """Some tier can serve the block."""
        return any(tier.has(name) for tier in self.tiers)

    def find(self, hashes: Iterable[BlockHash]) -> list[Tier]:
        """Find, for the longest run of these that the tiers can serve, which tier serves each: the fastest."""
        found: list[Tier] = []
        for name in hashes:
            tier = next((tier for tier in self.tiers if tier.name not in self.resting and tier.has(name)), None)
            if tier is None:
                break
            found.append(tier)
        return found

    def held_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading ones of these that the arena holds, or that nobody looks at any more."""
        return self.arena.hit(hashes, self.window, self.block_tokens).count

    def reach(self, hashes: Sequence[BlockHash]) -> list[ReadablePrefix]:
        """Say how far a prompt can be read behind what the arena holds, and how long that takes: the shortest first.

        One for each run of blocks in one tier. Tiers are read side by side; a read that would take too long is cut.
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
        """Note that a prompt is not read, though a tier may have some of it."""
        held = self.held_blocks(hashes)
        for tier in self.find(hashes[held : held + 1]):
            tier.speed.doubt()

    def pinned(self) -> Iterable[BlockId]:
        """Blocks of the arena that are being written, once for each write."""
        return (block for write in self._writes.values() for block in write.blocks)

    def write_back(self) -> list[KeepingCommand]:
        """Begin to write what has become cached since the last call, and what waited, as much as may be under way."""
        fresh, self.arena.fresh = self.arena.fresh or [], []
        for block in fresh:
            facts = self.arena.facts(block)
            if facts is not None:
                self._note(block, facts.name)
        commands = [command for tier in self.tiers for command in self._write_to(tier)]
        return [*commands, *self._puts.ended()]

    def shared_with(self, other: Tiers) -> Tier | None:
        """Find the fastest tier that another host has too and both can reach: what is put there can be taken here."""
        resting = self.resting | other.resting
        shared = [tier for tier in self.tiers if tier.rules.shared_as and tier in other.tiers]
        return next((tier for tier in shared if tier.name not in resting), None)

    def abandon(self) -> None:
        """The host is gone: what it wrote into a tier that others use too is not there."""
        for write in self._writes.values():
            write.tier.end_write(write.names, write.places, [False] * len(write.places))
        for part in [part for parts in self._loads.values() for part in parts]:
            part.tier.end_load(part.places, [True] * len(part.places))
        self._writes.clear()
        self._loads.clear()
        self._puts.clear()

    def _put(self, event: PutWanted) -> None:
        """Queue blocks before all others. Those that another host writes now are left to it."""
        tier = tier_named(self.tiers, event.tier)
        assert tier is not None, f"blocks are to be put into {event.tier}, which {self.host} does not have"
        writing = {name for write in self._writes.values() if write.tier is tier for name in write.names}
        left: set[BlockHash] = set()
        for name in event.hashes:
            block = self.arena.find(name)
            if tier.knows(name):
                tier.touch(name)
            elif block is not None:
                self._waiting[tier.name].pop(name, None)
                self._puts.urgent(tier.name)[name] = block
                self._puts.run_blocks[tier.name] = max(1, event.run_blocks)
                left.add(name)
            if name in writing:
                left.add(name)
        if event.number is not None:
            self._puts.wait(event.number, event.request_id, tier.name, left)
        tier.skipped += self._puts.trim(tier.name)

    def _note(self, block: BlockId, name: BlockHash) -> None:
        for tier in self.tiers:
            if tier.knows(name):
                tier.touch(name)
                continue
            waiting = self._waiting[tier.name]
            waiting[name] = block
            if len(waiting) > tier.rules.waiting_blocks_max:
                waiting.popitem(last=False)
                tier.skipped += 1

    def _write_to(self, tier: Tier) -> list[KeepingCommand]:
        commands: list[KeepingCommand] = []
        rules = tier.rules
        if tier.name in self.resting:  # what waits goes on waiting, as far as there is room for it; nobody waits for it
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
        """Count the blocks that this host writes to a tier now. It does not hear when those of other hosts end."""
        return sum(len(write.names) for write in self._writes.values() if write.tier is tier)

    def _begin_write(self, tier: Tier, wanted: Sequence[tuple[BlockHash, BlockId]]) -> list[KeepingCommand]:
        names: list[BlockHash] = []
        blocks: list[BlockId] = []
        places: list[BlockId] = []
        gone: list[BlockHash] = []
        for block, facts in self._in_order(tier, wanted):
            begun = tier.begin_write(facts)
            if begun is None:
                tier.skipped += 1
                continue
            names.append(facts.name)
            blocks.append(block)
            places.append(begun[0])
            gone += begun[1]
        self._puts.settle(tier.name, {name for name, _ in wanted}.difference(names))
        commands = self._drop(tier, gone)
        if not names:
            return commands
        self.arena.pin(blocks, uses=0)
        self._begun += 1
        self._writes[self._begun] = _Write(tier, tuple(names), tuple(blocks), tuple(places))
        return [*commands, StoreBlocks(self._begun, self.host, tier.name, tuple(names), tuple(blocks))]

    def _in_order(self, tier: Tier, wanted: Sequence[tuple[BlockHash, BlockId]]) -> list[tuple[BlockId, BlockFacts]]:
        """Heads of chains first; without what was given up meanwhile, or is there by now."""
        found: list[tuple[BlockId, BlockFacts]] = []
        for name, block in wanted:
            facts = self.arena.facts(block)
            if facts is not None and facts.name == name and not tier.knows(name):
                found.append((block, facts))
        return sorted(found, key=lambda pair: pair[1].start_tokens)

    def _drop(self, tier: Tier, gone: Sequence[BlockHash]) -> list[KeepingCommand]:
        """Blocks are no longer in this tier."""
        if not gone:
            return []
        for name in gone:
            self._unback(name)
        return [DropBlocks(self.host, tier.name, tuple(gone))]

    def _unback(self, name: BlockHash) -> None:
        """Note that a tier has lost a block."""
        block = self.arena.find(name)
        facts = self.arena.facts(block) if block is not None else None
        if facts is not None:
            facts.is_backed = self.has(name)

    def _end_write(self, event: BlocksKept) -> None:
        write = self._writes.pop(event.number, None)
        if write is None:
            return
        write.tier.end_write(write.names, write.places, event.kept)
        if any(event.kept):
            self._puts.settle(write.tier.name, write.names)
        else:
            self._puts.fail(write.tier.name, write.names)
        for block, kept in zip(write.blocks, event.kept, strict=True):
            facts = self.arena.facts(block)
            if facts is not None and kept:
                facts.is_backed = True
        fresh = list(self.arena.fresh or [])
        self.arena.unpin(write.blocks)
        self.arena.fresh = fresh  # written just now: a store that keeps nothing is not asked again at once

    def _load(self, event: LoadWanted) -> LoadBlocks:
        found = self.find(event.hashes)
        parts: list[_Part] = []
        for tier in self.tiers:
            indices = tuple(index for index, holder in enumerate(found) if holder is tier)
            if indices:
                places = tuple(tier.begin_load(event.hashes[index] for index in indices))
                parts.append(_Part(tier, indices, places, tier.loading))
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

    def _end_load(self, event: LoadEnded) -> list[KeepingCommand]:
        commands: list[KeepingCommand] = []
        for part in self._loads.pop(event.number, []):
            whole, took_s = [event.whole[index] for index in part.indices], event.took_s.get(part.tier.name)
            lost = part.tier.end_load(part.places, whole)
            # What is not there is not there at once: that says nothing of how long reading takes.
            if took_s is not None and (all(whole) or took_s > part.tier.speed.load_s(part.behind)):
                part.tier.speed.learn(part.behind, took_s)
            commands += self._drop(part.tier, lost)
        return commands

    def _open(self, event: TierOpened) -> list[KeepingCommand]:
        tier = tier_named(self.tiers, event.tier)
        return [] if tier is None else self._drop(tier, tier.fill(event.hashes))
