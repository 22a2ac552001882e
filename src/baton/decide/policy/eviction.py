"""Eviction: choose the cached block to evict when a request needs room.

A block is useful only while all blocks before it are cached. So each chain is evicted from its end. For
`LeastRecentlyUsed` this follows from the order in which requests unpin blocks; the others choose among chain ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts

_SLACK = 64
"""The heap is rebuilt when it holds more than twice the valid entries plus this many stale ones."""


@dataclass(frozen=True, slots=True)
class _Entry:
    facts: BlockFacts
    worth: float
    number: int
    """Sequence number. Distinguishes this entry from stale ones of the same block, and breaks ties: older first."""


@dataclass(slots=True)
class ChainEnds:
    """A heap of chain ends with lazy deletion. Every call takes amortized O(log n)."""

    _entries: dict[BlockId, _Entry] = field(default_factory=dict[BlockId, _Entry])
    _by_hash: dict[BlockHash, BlockId] = field(default_factory=dict[BlockHash, BlockId])
    _children: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])
    """Number of cached blocks that directly follow a block. Blocks without a successor are left out."""
    _heap: list[tuple[float, int, BlockId]] = field(default_factory=list[tuple[float, int, BlockId]])
    """(worth, number, block) of every chain end, and stale entries."""
    _floor: float = 0.0
    """Worth of the block that was evicted last. It is added to new blocks, so that old entries age."""
    _added: int = 0

    def add(self, block: BlockId, facts: BlockFacts, worth: float) -> None:
        """Add a block that has become cached. `worth`: its value before aging."""
        self._added += 1
        self._entries[block] = _Entry(facts, self._floor + worth, self._added)
        self._by_hash[facts.block_hash] = block
        if facts.parent is not None:
            self._children[facts.parent] = self._children.get(facts.parent, 0) + 1
        self._offer(block)

    def remove(self, block: BlockId) -> None:
        """Remove a block. Its predecessor may become a chain end."""
        facts = self._entries.pop(block).facts
        del self._by_hash[facts.block_hash]
        if facts.parent is None:
            return
        left = self._children[facts.parent] - 1
        if left:
            self._children[facts.parent] = left
            return
        del self._children[facts.parent]
        before = self._by_hash.get(facts.parent)
        if before is not None:
            self._offer(before)

    def pop(self) -> tuple[BlockId, BlockFacts]:
        """Remove and return the chain end with the lowest worth."""
        while True:
            worth, number, block = heappop(self._heap)
            entry = self._entries.get(block)
            if entry is not None and entry.number == number and entry.facts.block_hash not in self._children:
                self._floor = max(self._floor, worth)
                self.remove(block)
                return block, entry.facts

    def __len__(self) -> int:
        return len(self._entries)

    def _offer(self, block: BlockId) -> None:
        entry = self._entries[block]
        if entry.facts.block_hash in self._children:
            return
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [
                (held.worth, held.number, cached)
                for cached, held in self._entries.items()
                if held.facts.block_hash not in self._children
            ]
            heapify(self._heap)
            return
        heappush(self._heap, (entry.worth, entry.number, block))


@dataclass(slots=True)
class PastUses:
    """Use counts of evicted blocks, so that a block that returns keeps its history."""

    names_max: int
    """Maximum number of remembered hashes, about 150 bytes each. The hash evicted longest ago is dropped first."""
    _uses: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict[BlockHash, int])

    def total(self, facts: BlockFacts) -> int:
        """Return the number of requests that have used a block, before and after earlier evictions."""
        return facts.uses + self._uses.get(facts.block_hash, 0)

    def note(self, facts: BlockFacts) -> None:
        """Record the use count of a block that is evicted."""
        self._uses[facts.block_hash] = self._uses.pop(facts.block_hash, 0) + facts.uses
        if len(self._uses) > self.names_max:
            self._uses.popitem(last=False)


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

    def worth(self, facts: BlockFacts) -> float:
        """Return the value of a cached block before aging."""
        return float(self._past.total(facts))

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._ends.add(block, facts, self.worth(facts))

    def remove(self, block: BlockId) -> None:
        self._ends.remove(block)

    def pop(self) -> BlockId:
        block, facts = self._ends.pop()
        self._past.note(facts)
        return block

    def __len__(self) -> int:
        return len(self._ends)


@dataclass(slots=True, kw_only=True)
class CostAware(LeastFrequentlyUsed):
    """Evict the block with the lowest use count x recompute cost, aged as `LeastFrequentlyUsed`.

    All blocks have one size, so the worth is that of GreedyDual-Size-Frequency without the size. Recomputing a block
    costs its own tokens and attention to all tokens before it, so blocks deep in a long prompt cost more.

    Source: Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy (1998).
    """

    even_tokens: float = 30_000.0
    """Context length at which attention costs as much as the rest of a block: about 2 x weights / (layers x hidden
    size), 30,000 for an 8B model."""

    def worth(self, facts: BlockFacts) -> float:
        return self._past.total(facts) * (1.0 + facts.start_tokens / self.even_tokens)
