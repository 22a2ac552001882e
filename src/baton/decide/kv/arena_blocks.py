"""The blocks of one arena with their hashes, and the prefix-cache events that routing needs.

The arena of an engine server mirrors the server's own cache, by the server's events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.prefixes import BlocksRemoved, BlocksStored, CachedRun, EngineCacheChanged
from baton.core.tier_messages import PutWanted
from baton.core.types import BlockHash, BlockId, HostId, HostView
from baton.decide.kv.blocks import BlockFacts, Blocks, EvictionOrder, Hit
from baton.decide.kv.holding import Holding
from baton.decide.kv.spill import SpillSpace
from baton.decide.kv.tier import Tier
from baton.decide.kv.tiers import BackedBlocksFirst, Tiers
from baton.decide.kv.window import PromptRules, Window, behind_blocks


@dataclass(frozen=True, slots=True)
class ArenaBlocks:
    """Seals, pins and releases the blocks of requests in one arena."""

    host: HostId
    block_tokens: int
    block_runs: int
    """Number of hashes per block."""
    blocks: Blocks
    tiers: Tiers | None
    window: Window | None
    orders: Sequence[EvictionOrder]
    """Eviction orders of its cached blocks."""
    spill: SpillSpace | None = None
    """None: there is no spill space."""

    def hit(self, prefix: Sequence[BlockHash], first: int = 0) -> Hit:
        """Return the longest prefix hit without pinning it. Blocks before `first` need not be held."""
        if not prefix:
            return Hit(first, [])
        return self.blocks.hit(prefix, self.window, self.block_tokens, first)

    def adopt(self, holding: Holding, hit: Hit, prefix: Sequence[BlockHash]) -> None:
        """Pin the blocks of a hit for an empty holding."""
        self.blocks.pin(hit.blocks)
        holding.table, holding.behind = (BlockId(0),) * hit.behind + tuple(hit.blocks), hit.behind
        holding.hashes, holding.preempted = list(prefix[: hit.count]), False
        holding.computed_tokens = hit.count * self.block_tokens if hit.blocks else 0

    def _unpin_behind_window(self, holding: Holding) -> None:
        """Unpin blocks that have left the attention window."""
        behind = behind_blocks(self.window, holding.computed_tokens, self.block_tokens)
        if behind > holding.behind:
            self.blocks.unpin(holding.table[holding.behind : behind])
            holding.behind = behind

    def lease(self, holding: Holding) -> None:
        """Pin a holding's blocks for a copy, independently of the holding's lifetime."""
        self.blocks.pin(holding.held, uses=0)
        holding.leased += holding.held
        holding.leases += 1

    def end_lease(self, holding: Holding) -> None:
        """End one lease. The last one unpins the blocks."""
        holding.leases -= 1
        if not holding.leases:
            self.blocks.unpin(holding.leased)
            holding.leased = ()

    def preempt(self, holding: Holding) -> None:
        """Take the blocks of a preempted request. The request will need their KV again.

        Blocks that the fastest tier lacks are written first. With preemption `recompute` none is written now; they are
        written like any others after the request has ended.
        """
        fresh, tiers = self.blocks.fresh, self.tiers
        if tiers is not None and tiers.preemption == "recompute":
            self.blocks.fresh = None
        elif tiers is not None and tiers.fastest is not None:
            hashes = tuple(holding.hashes)
            tiers.handle(PutWanted(holding.request.id, None, tiers.fastest.name, hashes, len(hashes)))
        self.empty(holding)
        self.blocks.fresh = fresh
        holding.preempted = True

    def empty(self, holding: Holding) -> None:
        """Unpin all blocks of a holding, and free its slots. Sealed blocks of the arena stay cached."""
        self.blocks.unpin(holding.held)
        if self.spill is not None:
            self.spill.empty(holding)
        holding.table, holding.hashes = (), []
        holding.behind = holding.computed_tokens = holding.wanted = 0
        holding.preempting = holding.reading = False

    def seal(self, holding: Holding, first: int, hashes: Sequence[BlockHash]) -> list[BlocksStored]:
        """Seal the blocks of a request from index `first` on, and unpin those that have left the window."""
        if first <= len(holding.hashes):
            holding.hashes[first:] = hashes
        events = self._seal_held(holding, first, hashes)
        self._unpin_behind_window(holding)
        return events

    def _seal_held(self, holding: Holding, first: int, hashes: Sequence[BlockHash]) -> list[BlocksStored]:
        """Seal the blocks of a request from index `first` on, as far as it holds them.

        Return an event for hashes that are new in this arena.
        """
        table, tenant, behind = holding.table, holding.request.tenant, holding.behind
        if first < behind:
            first, hashes = behind, hashes[behind - first :]
        before = self.blocks.facts(table[first - 1]) if behind < first <= len(table) else None
        parent = before.block_hash if before is not None else None
        stored: list[BlockHash] = []
        for depth, (block, block_hash) in enumerate(zip(table[first:], hashes, strict=False), first):
            is_backed = self.tiers is not None and self.tiers.has(block_hash)
            facts = BlockFacts(block_hash, parent, depth * self.block_tokens, tenant, is_backed=is_backed)
            if self.blocks.seal(block, facts):
                stored.append(block_hash)
            parent = block_hash
        return [BlocksStored(self.host, tuple(stored), self.block_runs)] if stored else []

    def take(self, count: int) -> tuple[list[BlockId], list[BlocksRemoved]]:
        """Take empty blocks for a request. Return them, and an event for evicted blocks. Tiers may still have them."""
        taken, lost = self.blocks.take(count)
        return taken, [BlocksRemoved(self.host, tuple(lost))] if lost else []

    def view(self) -> HostView:
        """Return the number of blocks in each state."""
        return HostView(
            id=self.host,
            blocks_total=self.blocks.total,
            blocks_free=self.blocks.free,
            blocks_used=self.blocks.used,
            blocks_cached=self.blocks.cached,
        )

    def check(self, pins: Sequence[int]) -> None:
        """Assert that the pins are those of requests (`pins`) plus those of writes to tiers."""
        expected = list(pins)
        for block in self.tiers.pinned() if self.tiers is not None else ():
            expected[block] += 1
        self.blocks.check(expected)


class _Host(Protocol):
    host: HostId
    block_tokens: int
    block_runs: int
    window: Window | None


def empty_arena(
    pool: _Host,
    blocks_total: int,
    eviction: Callable[[], EvictionOrder],
    tiers: Sequence[Tier],
    prompts: PromptRules,
) -> ArenaBlocks:
    """Return the blocks of an empty arena, with these tiers below it and the spill space of `prompts`."""
    orders = [eviction() for _ in range(2 if tiers else 1)]
    blocks = Blocks(blocks_total, BackedBlocksFirst(*orders) if tiers else orders[0])
    below: Tiers | None = None
    if tiers:
        below = Tiers(
            host=pool.host,
            arena=blocks,
            tiers=tiers,
            block_tokens=pool.block_tokens,
            window=pool.window,
            preemption=prompts.preemption,
        )
    spill = SpillSpace(prompts.spill, blocks) if prompts.spill is not None else None
    return ArenaBlocks(pool.host, pool.block_tokens, pool.block_runs, blocks, below, pool.window, orders, spill)


def mirror_cache(arena: ArenaBlocks, event: EngineCacheChanged) -> list[BlocksRemoved | BlocksStored]:
    """Cache and forget blocks as an engine server has done. Return the events for routing.

    A forgotten block that a request holds stays with the request, and is free after it.
    """
    lost = list(arena.blocks.hashes) if event.is_cleared else event.removed
    removed = [block_hash for block_hash in lost if _forget(arena, block_hash)]
    events: list[BlocksRemoved | BlocksStored] = [BlocksRemoved(arena.host, tuple(removed))] if removed else []
    for run in event.stored:
        events += _cache_run(arena, run)
    return events


def _forget(arena: ArenaBlocks, block_hash: BlockHash) -> bool:
    block = arena.blocks.find(block_hash)
    return block is not None and arena.blocks.forget(block) is not None


def _cache_run(arena: ArenaBlocks, run: CachedRun) -> list[BlocksRemoved | BlocksStored]:
    """Cache the blocks of a run that are not known, as far as there is room. The known ones count as used now."""
    known = [block for block in map(arena.blocks.find, run.hashes) if block is not None]
    arena.blocks.pin(known)  # pinned blocks are not evicted for the new ones
    events = _cache_new(arena, run) if len(known) < len(run.hashes) else []
    arena.blocks.unpin(known)
    return events


def _cache_new(arena: ArenaBlocks, run: CachedRun) -> list[BlocksRemoved | BlocksStored]:
    parents = (run.parent, *run.hashes)
    new = [
        BlockFacts(block_hash, parents[index], (run.first + index) * arena.block_tokens, uses=0)
        for index, block_hash in enumerate(run.hashes)
        if arena.blocks.find(block_hash) is None
    ]
    del new[arena.blocks.available :]
    if not new:
        return []
    taken, evicted = arena.take(len(new))
    for block, facts in zip(taken, new, strict=True):
        arena.blocks.seal(block, facts)
    arena.blocks.unpin(taken)
    return [*evicted, BlocksStored(arena.host, tuple(facts.block_hash for facts in new), arena.block_runs)]
