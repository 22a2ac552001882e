"""Mirror the KV cache of an engine server in the pool of its host, by the server's own events."""

from __future__ import annotations

from baton.core.prefixes import BlocksRemoved, BlocksStored, CachedRun, EngineCacheChanged
from baton.core.types import BlockHash
from baton.decide.kv.arena_blocks import ArenaBlocks
from baton.decide.kv.blocks import BlockFacts


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
    events = _cache_new(arena, run)
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
