"""Cached blocks by worth, of which only those may go that no other cached block stands behind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts

_SLACK = 64
"""Entries of the heap that may be out of date before it is made anew, beside as many as are valid."""


@dataclass(frozen=True, slots=True)
class _Entry:
    facts: BlockFacts
    worth: float
    number: int
    """Tells it from an earlier stay of the same block, and breaks ties: older goes first."""


@dataclass(slots=True)
class ChainEnds:
    """A heap of chains' ends with lazy deletion: every call takes O(log n), amortized."""

    _entries: dict[BlockId, _Entry] = field(default_factory=dict[BlockId, _Entry])
    _by_name: dict[BlockHash, BlockId] = field(default_factory=dict[BlockHash, BlockId])
    _children: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])
    """Cached blocks that stand right behind this one. Without those that have none."""
    _heap: list[tuple[float, int, BlockId]] = field(default_factory=list[tuple[float, int, BlockId]])
    """(worth, number, block): every end once, and what is no end any more."""
    _floor: float = 0.0
    """Worth of what was given up last: what comes now is worth that much more than what came at the start."""
    _added: int = 0

    def add(self, block: BlockId, facts: BlockFacts, worth: float) -> None:
        """Note a block that has become cached, and what it is worth beside others of this moment."""
        self._added += 1
        self._entries[block] = _Entry(facts, self._floor + worth, self._added)
        self._by_name[facts.name] = block
        if facts.parent is not None:
            self._children[facts.parent] = self._children.get(facts.parent, 0) + 1
        self._offer(block)

    def remove(self, block: BlockId) -> None:
        """Forget a block. The one before it may become an end."""
        facts = self._entries.pop(block).facts
        del self._by_name[facts.name]
        if facts.parent is None:
            return
        left = self._children[facts.parent] - 1
        if left:
            self._children[facts.parent] = left
            return
        del self._children[facts.parent]
        before = self._by_name.get(facts.parent)
        if before is not None:
            self._offer(before)

    def pop(self) -> tuple[BlockId, BlockFacts]:
        """Take out the end that is worth least."""
        while True:
            worth, number, block = heappop(self._heap)
            entry = self._entries.get(block)
            if entry is not None and entry.number == number and entry.facts.name not in self._children:
                self._floor = max(self._floor, worth)
                self.remove(block)
                return block, entry.facts

    def __len__(self) -> int:
        return len(self._entries)

    def _offer(self, block: BlockId) -> None:
        entry = self._entries[block]
        if entry.facts.name in self._children:
            return
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [
                (held.worth, held.number, cached)
                for cached, held in self._entries.items()
                if held.facts.name not in self._children
            ]
            heapify(self._heap)
            return
        heappush(self._heap, (entry.worth, entry.number, block))


@dataclass(slots=True)
class PastUses:
    """How many requests stood on blocks that were given up: one that comes back is worth what it was, and more."""

    names_max: int
    """Most names that are remembered, at about 150 bytes each. Past that, the one given up longest ago is forgotten."""
    _uses: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict[BlockHash, int])

    def total(self, facts: BlockFacts) -> int:
        """Count the requests that have stood on a block, in this stay and in those before."""
        return facts.uses + self._uses.get(facts.name, 0)

    def note(self, facts: BlockFacts) -> None:
        """Remember a block that is given up."""
        self._uses[facts.name] = self._uses.pop(facts.name, 0) + facts.uses
        if len(self._uses) > self.names_max:
            self._uses.popitem(last=False)
