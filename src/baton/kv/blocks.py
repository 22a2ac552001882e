"""The blocks of one host: which are free, which are pinned and how often, which are cached under which hash.

Every block is in exactly one state: *free* (its content means nothing), *used* (pinned by at least one request) or
*cached* (sealed, pinned by nobody, findable by its hash). free + used + cached = total after every call (INV-4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from baton.core.types import BlockHash, BlockId


@runtime_checkable
class EvictionOrder(Protocol):
    """Decides which cached block is given up first. Holds every cached block exactly once."""

    def add(self, block: BlockId) -> None:
        """A block has just become cached."""
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
        self._free: list[BlockId] = [BlockId(block) for block in range(total - 1, -1, -1)]
        self._pins: list[int] = [0] * total
        self._hashes: list[BlockHash | None] = [None] * total
        self._by_hash: dict[BlockHash, BlockId] = {}

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
        return self.free + self.cached

    def match(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Find the longest run of leading hashes that this host holds. Pins nothing."""
        found: list[BlockId] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def unpinned(self, blocks: Iterable[BlockId]) -> int:
        """Count those of the blocks that nobody pins: taking them as a prefix hit makes fewer available."""
        return sum(self._pins[block] == 0 for block in blocks)

    def pin(self, blocks: Iterable[BlockId]) -> None:
        """Let one more request read these sealed blocks."""
        for block in blocks:
            if self._pins[block] == 0:
                self._eviction.remove(block)
            self._pins[block] += 1

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
        pins = self._pins
        for block in taken:
            pins[block] = 1
        return taken, evicted

    def seal(self, block: BlockId, name: BlockHash) -> bool:
        """Name a full block. False where another block has the name, or this one has another: nothing changes then."""
        assert self._pins[block] > 0, f"block {block} is sealed by nobody"
        if name in self._by_hash or self._hashes[block] is not None:
            return False
        self._by_hash[name] = block
        self._hashes[block] = name
        return True

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Take back one request's pins. A sealed block becomes cached, another one free.

        Back to front, so that of one request the deepest block is evicted first: a prefix is worth more than its end.
        """
        pins, hashes, free = self._pins, self._hashes, self._free
        if not self._by_hash:  # nobody shares a block that has no name
            for block in blocks:
                assert pins[block] == 1, f"block {block} is pinned {pins[block]} times without a name"
                pins[block] = 0
            free.extend(reversed(blocks))
            return
        for block in reversed(blocks):
            left = pins[block] = pins[block] - 1
            if left:
                assert left > 0, f"block {block} is unpinned more often than it was pinned"
            elif hashes[block] is None:
                free.append(block)
            else:
                self._eviction.add(block)

    def _evict(self) -> BlockHash:
        block = self._eviction.pop()
        name = self._hashes[block]
        assert name is not None, f"cached block {block} has no name"
        del self._by_hash[name]
        self._hashes[block] = None
        self._free.append(block)
        return name

    def check(self, pins_expected: Sequence[int]) -> None:
        """Assert INV-4 and that the pins are exactly those of the requests. For tests, checkers and idle time."""
        assert list(pins_expected) == self._pins, "pins are not those of the requests"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(self.total):
            named = self._hashes[block] is not None
            pinned = self._pins[block] > 0
            assert (block in free) == (not named and not pinned), f"block {block} is lost or free while in use"
        cached = sum(name is not None and not pins for name, pins in zip(self._hashes, self._pins, strict=True))
        assert cached == len(self._eviction), "the eviction order does not hold exactly the cached blocks"
        assert all(self._hashes[block] == name for name, block in self._by_hash.items()), (
            "the index names a wrong block"
        )
