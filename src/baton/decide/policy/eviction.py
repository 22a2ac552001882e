"""Eviction: choose the cached block to evict when a request needs room.

A block is useful only while all blocks before it are cached. So each chain is evicted from its end. For
`LeastRecentlyUsed` this follows from the order in which requests unpin blocks; the others choose among chain ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.core.types import BlockId
from baton.decide.kv.blocks import BlockFacts
from baton.decide.policy.chain_ends import ChainEnds, PastUses


class LeastRecentlyUsed:
    """Evict the block that was unpinned longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._order[block] = None

    def remove(self, block: BlockId) -> None:
        del self._order[block]

    def pop(self) -> BlockId:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)


@dataclass(slots=True, kw_only=True)
class LeastFrequentlyUsed:
    """Evict the block that the fewest requests have used, with aging.

    Source: Arlitt et al., Evaluating content management techniques for web proxy caches (2000), LFU with dynamic
    aging: the worth of a block is its use count plus the worth of the block evicted last before it became cached.
    """

    remembered_max: int = 200_000
    """Evicted blocks whose use count is remembered (30 MB for the default). 0: a block that returns starts at 0."""
    _ends: ChainEnds = field(default_factory=ChainEnds)
    _past: PastUses = field(init=False)

    def __post_init__(self) -> None:
        self._past = PastUses(self.remembered_max)

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._ends.add(block, facts, float(self._past.total(facts)))

    def remove(self, block: BlockId) -> None:
        self._ends.remove(block)

    def pop(self) -> BlockId:
        block, facts = self._ends.pop()
        self._past.note(facts)
        return block

    def __len__(self) -> int:
        return len(self._ends)


@dataclass(slots=True, kw_only=True)
class CostAware:
    """Evict the block with the lowest use count x recompute cost, aged as `LeastFrequentlyUsed`.

    All blocks have one size, so the worth is that of GreedyDual-Size-Frequency without the size. Recomputing a block
    costs its own tokens and attention to all tokens before it, so blocks deep in a long prompt cost more.

    Source: Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy (1998).
    """

    even_tokens: float = 30_000.0
    """Context length at which attention costs as much as the rest of a block: about 2 x weights / (layers x hidden
    size), 30,000 for an 8B model."""
    remembered_max: int = 200_000
    """Evicted blocks whose use count is remembered (30 MB for the default). 0: a block that returns starts at 0."""
    _ends: ChainEnds = field(default_factory=ChainEnds)
    _past: PastUses = field(init=False)

    def __post_init__(self) -> None:
        self._past = PastUses(self.remembered_max)

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._ends.add(block, facts, self._past.total(facts) * (1.0 + facts.start_tokens / self.even_tokens))

    def remove(self, block: BlockId) -> None:
        self._ends.remove(block)

    def pop(self) -> BlockId:
        block, facts = self._ends.pop()
        self._past.note(facts)
        return block

    def __len__(self) -> int:
        return len(self._ends)
