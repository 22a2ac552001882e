"""The blocks of one host: which are free, which are pinned and how often, which are cached under which hash.

Every block is in exactly one state: *free* (its content means nothing), *used* (pinned by at least one request) or
*cached* (sealed, pinned by nobody, findable by its hash). free + used + cached = total after every call (INV-4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

from msgspec import Struct

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.window import Window, behind_blocks, longest_hit

Writes = Literal["cached", "sealed"]
"""When a block is looked at for the tiers below."""


@dataclass(slots=True)
class BlockFacts:
    """What is known of a sealed block: what a choice of which to give up may look at."""

    name: BlockHash
    parent: BlockHash | None = None
    """Name of the block before it, where that is known. None: it is the first of its prompt, or nobody knows."""
    start_tokens: int = 0
    """Tokens that stand before it: what has to be there, or to be computed, before it is of use."""
    tenant: str = ""
    """Whose request sealed it."""
    uses: int = 1
    """Requests that have stood on it, the one that sealed it included."""
    is_backed: bool = False
    """A tier below holds it too: giving it up here loses nothing."""


class Hit(Struct, frozen=True, gc=False):
    """Leading blocks of a prompt that need not be computed, of which those behind a window need not be held either."""

    behind: int
    """Leading blocks that nobody looks at: not held here."""
    blocks: list[BlockId]
    """Those after them."""

    @property
    def count(self) -> int:
        return self.behind + len(self.blocks)


@runtime_checkable
class EvictionOrder(Protocol):
    """Decides which cached block is given up first. Holds every cached block exactly once."""

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        """A block has just become cached. The facts may be kept, and change only while it is not cached."""
        ...

    def remove(self, block: BlockId) -> None:
        """A cached block is used again."""
        ...

    def pop(self) -> BlockId:
        """Take out the block to give up. Called only while there is one."""
        ...

    def __len__(self) -> int: ...


class Blocks:
    """Counts and names; no bytes and no requests. The callers decide who may take what."""

    def __init__(self, total: int, eviction: EvictionOrder) -> None:
        self.total = total
        self._eviction = eviction
        self._free = cast("list[BlockId]", list(range(total - 1, -1, -1)))
        self._places: list[int] = list(range(total - 1, -1, -1))
        """Where in `_free` each block was put when it was last let go of one by one."""
        self._pins: list[int] = [1] * total
        """Of a free block 1: that of whoever takes it. So nothing is counted for blocks that only one request has."""
        self._facts: list[BlockFacts | None] = [None] * total
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._shared = 0
        """Pins beyond the first one of a block."""
        self.fresh: list[BlockId] | None = None
        """Where it is a list: blocks that have become cached are added, for whoever takes them out."""
        self.fresh_when: Writes = "cached"
        """`sealed`: they are added when they are sealed, too."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._eviction)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Blocks that `take` can give: free ones, and cached ones that it may evict."""
        return len(self._free) + len(self._eviction)

    def hit(self, hashes: Sequence[BlockHash], window: Window | None, block_tokens: int, first: int = 0) -> Hit:
        """Find the most leading blocks of a prompt that need not be computed. Pins nothing. See `longest_hit`."""
        by_hash = self._by_hash
        count = longest_hit((name in by_hash for name in hashes), window, block_tokens, first)
        behind = max(first, behind_blocks(window, count * block_tokens, block_tokens))
        return Hit(behind, [by_hash[name] for name in hashes[behind:count]])

    def find(self, name: BlockHash) -> BlockId | None:
        """Find the block of a name."""
        return self._by_hash.get(name)

    @property
    def named(self) -> int:
        """Sealed blocks, pinned or not."""
        return len(self._by_hash)

    def unpinned(self, blocks: Iterable[BlockId]) -> int:
        """Count those of the blocks that nobody pins: taking them as a prefix hit makes fewer available."""
        return [self._pins[block] for block in blocks].count(0)

    def pin(self, blocks: Iterable[BlockId], uses: int = 1) -> None:
        """Let one more request read these sealed blocks. 0 uses: something that is no request, and is not counted."""
        for block in blocks:
            if self._pins[block] == 0:
                self._eviction.remove(block)
            else:
                self._shared += 1
            self._pins[block] += 1
            facts = self._facts[block]
            if facts is not None:
                facts.uses += uses

    def forget(self, block: BlockId) -> BlockHash | None:
        """Take a block's name away: what it holds is not what the name says. Returns the name, if it had one.

        Whoever pins the block still does; it is free when nobody does.
        """
        facts = self._facts[block]
        if facts is None:
            return None
        if self._pins[block] == 0:
            self._eviction.remove(block)
            self._let_go(block)
        del self._by_hash[facts.name]
        self._facts[block] = None
        return facts.name

    def take(self, count: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Pin `count` blocks without content for one request; evict as needed. Needs count <= available.

        Returns the blocks and the hashes of what was evicted for them.
        """
        assert count <= self.available, f"asked for {count} blocks of {self.available} available"
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        evicted: list[BlockHash] = []
        while len(taken) < count:
            evicted.append(self._evict())
            taken.append(self._free.pop())
        return taken, evicted

    def seal(self, block: BlockId, facts: BlockFacts) -> bool:
        """Name a full block. False where another block has the name, or this one has another: nothing changes then."""
        assert self._pins[block] > 0, f"block {block} is sealed by nobody"
        if facts.name in self._by_hash or self._facts[block] is not None:
            return False
        self._by_hash[facts.name] = block
        self._facts[block] = facts
        if self.fresh is not None and self.fresh_when == "sealed":
            self.fresh.append(block)
        return True

    def facts(self, block: BlockId) -> BlockFacts | None:
        """Return what is known of a sealed block. None: it has no name."""
        return self._facts[block]

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Take back one request's pins. A sealed block becomes cached, another one free.

        Back to front, so that of one request the deepest block is evicted first: a prefix is worth more than its end.
        """
        pins, facts = self._pins, self._facts
        if not self._by_hash and not self._shared:
            self._free.extend(reversed(blocks))  # none has a name, and none is shared: there is nothing to look at
            assert self.available <= self.total, "blocks are unpinned more often than they were pinned"
            return
        for block in reversed(blocks):
            left = pins[block] = pins[block] - 1
            if left:
                assert left > 0, f"block {block} is unpinned more often than it was pinned"
                self._shared -= 1
            elif (known := facts[block]) is None:
                self._let_go(block)
            else:
                self._eviction.add(block, known)
                if self.fresh is not None:
                    self.fresh.append(block)

    def _evict(self) -> BlockHash:
        block = self._eviction.pop()
        facts = self._facts[block]
        assert facts is not None, f"cached block {block} has no name"
        del self._by_hash[facts.name]
        self._facts[block] = None
        self._let_go(block)
        return facts.name

    def _let_go(self, block: BlockId) -> None:
        free, place = self._free, self._places[block]
        assert place >= len(free) or free[place] != block, f"block {block} is unpinned more often than it was pinned"
        self._places[block] = len(free)
        free.append(block)
        self._pins[block] = 1

    def check(self, pins_expected: Sequence[int]) -> None:
        """Assert INV-4 and that the pins are exactly those of the requests. For tests, checkers and idle time."""
        free = set(self._free)
        for block, (expected, pins) in enumerate(zip(pins_expected, self._pins, strict=True)):
            assert pins == (1 if block in free else expected), f"pins of block {block} are not those of the requests"
        assert self._shared == sum(pins - 1 for pins in self._pins if pins), "pins of several are not counted"
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.total):
            named = self._facts[block] is not None
            pinned = pins_expected[block] > 0
            assert (block in free) == (not named and not pinned), f"block {block} is lost or free while in use"
        cached = sum(facts is not None and not pins for facts, pins in zip(self._facts, self._pins, strict=True))
        assert cached == len(self._eviction), "the eviction order does not hold exactly the cached blocks"
        by_hash = {facts.name: block for block, facts in enumerate(self._facts) if facts is not None}
        assert by_hash == self._by_hash, "the index names a wrong block"
