"""Eviction: which cached block is given up when a request needs room.

A block is of use only while all blocks before it are there. So a chain is given up from its end: `LeastRecentlyUsed`
gets that from the order in which a request lets go of its blocks, the others choose among chains' ends alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from baton.core.types import BlockId
from baton.decide.kv.blocks import BlockFacts
from baton.decide.policy.chain_ends import ChainEnds, PastUses


class LeastRecentlyUsed:
    """Give up the block that was unpinned longest ago: prompts that come back, come back soon."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        """See `EvictionOrder.add`."""
        self._order[block] = None

    def remove(self, block: BlockId) -> None:
        """See `EvictionOrder.remove`."""
        del self._order[block]

    def pop(self) -> BlockId:
        """See `EvictionOrder.pop`."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)


@dataclass(slots=True, kw_only=True)
class LeastFrequentlyUsed:
    """Give up the block that fewest requests stood on; what was popular long ago ages away.

    Source: Arlitt et al., Evaluating content management techniques for web proxy caches (2000), LFU with dynamic
    aging: a block's worth is its uses, plus the worth of what was given up last when it became cached.
    """

    remembered_max: int = 200_000
    """Blocks whose uses are still known when they come back after they were given up: 30 MB. 0: they start anew."""
    _ends: ChainEnds = field(default_factory=ChainEnds)
    _past: PastUses = field(init=False)

    def __post_init__(self) -> None:
        self._past = PastUses(self.remembered_max)

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        """See `EvictionOrder.add`."""
        self._ends.add(block, facts, float(self._past.total(facts)))

    def remove(self, block: BlockId) -> None:
        """See `EvictionOrder.remove`."""
        self._ends.remove(block)

    def pop(self) -> BlockId:
        """See `EvictionOrder.pop`."""
        block, facts = self._ends.pop()
        self._past.note(facts)
        return block

    def __len__(self) -> int:
        return len(self._ends)


@dataclass(slots=True, kw_only=True)
class CostAware:
    """Keep what is dear to compute again and likely to be asked for: uses x recompute cost, aged as above.

    Blocks have one size, so that the worth is GreedyDual-Size-Frequency's without its size. Computing a block costs
    its own tokens, and attention to all that stand before it: the end of a long prompt is dearer than that of a short.

    Source: Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy (1998).
    """

    even_tokens: float = 30_000.0
    """Tokens before a block at which attention to them costs as much as the rest of computing it: about 2 x weights /
    (layers x hidden size), 30,000 of an 8B model."""
    remembered_max: int = 200_000
    """Blocks whose uses are still known when they come back after they were given up: 30 MB. 0: they start anew."""
    _ends: ChainEnds = field(default_factory=ChainEnds)
    _past: PastUses = field(init=False)

    def __post_init__(self) -> None:
        self._past = PastUses(self.remembered_max)

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        """See `EvictionOrder.add`."""
        self._ends.add(block, facts, self._past.total(facts) * (1.0 + facts.start_tokens / self.even_tokens))

    def remove(self, block: BlockId) -> None:
        """See `EvictionOrder.remove`."""
        self._ends.remove(block)

    def pop(self) -> BlockId:
        """See `EvictionOrder.pop`."""
        block, facts = self._ends.pop()
        self._past.note(facts)
        return block

    def __len__(self) -> int:
        return len(self._ends)
