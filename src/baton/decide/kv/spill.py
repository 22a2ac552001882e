"""The spill space of a host: slots for cold blocks of running requests that are larger than their share of the arena.

A request keeps its newest blocks in the arena. Its oldest sealed blocks move to slots, from which every step reads
them. The slots belong to that request alone, and are free after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from msgspec import Struct

from baton.core.spill import SPILLED_FROM, SpillBlocks, with_slots
from baton.core.types import BlockId, StepShape
from baton.core.validation import Count
from baton.decide.kv.holding import Holding

_HOT_RATIO = 0.75
"""Share of the arena that one request may hold before its blocks are spilled. Other requests use the rest."""


class SpillRules(Struct, frozen=True, kw_only=True):
    """The spill space below the arena of a host."""

    blocks: Count
    """Number of slots."""
    token_read_s: float
    """Seconds to read the KV of one token from the spill space."""
    tokens_max: Count
    """Maximum tokens of a request. The KV of a longer one could not be read at the configured minimum decode rate."""

    def step_s(self, shape: StepShape, computed_s: float) -> float:
        """Return the seconds of a step, given the seconds of its computation.

        The system reads the layers ahead of the computation, so the slower of the two determines the step.
        """
        return max(computed_s, self.token_read_s * shape.spilled_tokens)


def spill_rules(
    *, blocks: int, block_tokens: int, token_bytes: int, bytes_per_s: float, tokens_per_s_min: float
) -> SpillRules:
    """Return the rules of a spill space that is read with `bytes_per_s`.

    `tokens_per_s_min`: a request is refused if its decode steps could be slower at its maximum length.
    """
    token_read_s = token_bytes / bytes_per_s
    tokens_max = max(1, int(1.0 / (tokens_per_s_min * token_read_s)))
    return SpillRules(blocks=blocks, token_read_s=token_read_s, tokens_max=max(block_tokens, tokens_max))


def hot_blocks(arena_blocks: int) -> int:
    """Return the number of blocks that a request may hold in an arena with a spill space."""
    return max(min(2, arena_blocks), int(_HOT_RATIO * arena_blocks))


class PinnedBlocks(Protocol):
    """The blocks of the arena above a spill space."""

    @property
    def total(self) -> int: ...

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Remove one pin of each block."""
        ...


class SpillSpace:
    """The slots of one host's spill space. Decides which blocks of a request move there."""

    def __init__(self, rules: SpillRules, arena: PinnedBlocks) -> None:
        self.rules = rules
        self._arena = arena
        self.hot_blocks = hot_blocks(arena.total)
        """Maximum number of arena blocks of one request."""
        self.ahead_blocks = max(1, self.hot_blocks // 2)
        """Arena blocks beyond the computed ones that a request with more than `hot_blocks` may hold."""
        self._free = list(range(rules.blocks))  # a heap: low slots first, so that a context is few runs

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def is_oversized(self, holding: Holding) -> bool:
        """Return whether a request wants more blocks than it may hold in the arena."""
        return holding.wanted > self.hot_blocks

    def hit_blocks_max(self, holding: Holding) -> int:
        """Return the maximum length of a prefix hit, which leaves an oversized request room for new blocks."""
        return self.hot_blocks - (self.ahead_blocks if self.is_oversized(holding) else 0)

    def begin(self, holding: Holding, missing: int) -> SpillBlocks | None:
        """Move the oldest arena blocks of a request to slots. Return the order to copy them. None: no block can move.

        It moves `missing` blocks, but at least a quarter of `hot_blocks`, and at most its sealed blocks and the free
        slots. The table names the slots at once. The arena blocks stay pinned, as `Holding.spilling`, until the worker
        has copied them. The newest sealed block stays: after a handoff its last token may be computed again.
        """
        first, sealed = holding.behind, len(holding.hashes) - 1
        count = min(max(missing, self.hot_blocks // 4), sealed - first, self.free)
        if holding.spilling or count <= 0:
            return None
        slots = tuple(heappop(self._free) for _ in range(count))
        end = first + count
        holding.spilling = holding.table[first:end]
        holding.table = with_slots(holding.table, first, slots)
        holding.behind = end
        return SpillBlocks(holding.request.id, holding.attempt, first, holding.spilling, slots)

    def end(self, holding: Holding) -> None:
        """Unpin the arena blocks that the worker has copied."""
        self._arena.unpin(holding.spilling)
        holding.spilling = ()

    def revert(self, holding: Holding) -> None:
        """Undo a move that no worker will confirm. The arena still has the blocks."""
        first = holding.behind - len(holding.spilling)
        self._release(holding.table[first : holding.behind])
        holding.table = holding.table[:first] + holding.spilling + holding.table[holding.behind :]
        holding.behind, holding.spilling = first, ()

    def empty(self, holding: Holding) -> None:
        """Free all slots of a request that no worker touches."""
        self.end(holding)
        self._release(holding.table[: holding.behind])

    def check(self, holdings: Sequence[Holding]) -> None:
        """Assert that every slot is free or in one table (INV-4)."""
        used = [block for held in holdings for block in held.table[: held.behind]]
        slots = sorted([*self._free, *(block - SPILLED_FROM for block in used)])
        assert slots == list(range(self.rules.blocks)), (
            f"{self.rules.blocks} slots of the spill space, but these are known: {slots}"
        )

    def _release(self, ids: Sequence[int]) -> None:
        for block in ids:
            heappush(self._free, block - SPILLED_FROM)
