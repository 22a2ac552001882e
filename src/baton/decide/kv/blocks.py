"""State of the blocks of one host: free, pinned (with counts), or cached under a hash.

Every block is in exactly one state: *free* (its content is undefined), *used* (pinned by at least one request) or
*cached* (sealed, not pinned, found by its hash). free + used + cached = total after every call (INV-4).
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

from msgspec import Struct

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.window import Window, behind_blocks, longest_hit

Writes = Literal["cached", "sealed"]
"""When a block becomes a candidate for a write to the tiers."""


@dataclass(slots=True)
class BlockFacts:
    """Metadata of a sealed block, used by eviction orders."""

    block_hash: BlockHash
    parent: BlockHash | None = None
    """Hash of the previous block. None: this is the first block of its prompt, or the previous block is not known."""
    start_tokens: int = 0
    """Number of tokens before the block. They must be cached or computed before the block is useful."""
    tenant: str = ""
    """Tenant of the request that sealed it."""
    uses: int = 1
    """Number of requests that have used it, including the one that sealed it."""
    is_backed: bool = False
    """A tier holds a copy, so an eviction loses no data."""


class Hit(Struct, frozen=True, gc=False):
    """A prefix hit: leading blocks that need no prefill. Blocks behind an attention window need not be held."""

    behind: int
    """Leading blocks behind the window. They are not held."""
    blocks: list[BlockId]
    """The blocks after them."""

    @property
    def count(self) -> int:
        return self.behind + len(self.blocks)


@runtime_checkable
class EvictionOrder(Protocol):
    """Order in which cached blocks are evicted. Holds every cached block exactly once."""

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        """Add a block that has become cached. `facts` may be kept: they change only while the block is not cached."""
        ...

    def remove(self, block: BlockId) -> None:
        """Remove a cached block that is used again."""
        ...

    def pop(self) -> BlockId:
        """Remove and return the block to evict. Called only if there is one."""
        ...

    def __len__(self) -> int: ...


class Blocks:
    """Pins and hashes of the blocks of one arena or tier. Holds no bytes and knows no requests."""

    def __init__(self, total: int, eviction: EvictionOrder) -> None:
        self.total = total
        self._eviction = eviction
        self.unused = total
        """Number of blocks that were never taken. They have no metadata: a store of unknown size counts as a million
        blocks, whose metadata would take 90 MB. To remove such blocks for good, reduce it and `total`."""
        self._free: list[BlockId] = []
        """Free blocks that were taken before."""
        self._free_index: list[int] = []
        """Index in `_free` at which each block was last put by `_release`. Detects a double release."""
        self._pins: list[int] = []
        """Pin counts. A free block has 1, so that `take` and `unpin` need no count for blocks of a single request."""
        self._facts: list[BlockFacts | None] = []
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._shared = 0
        """Number of pins beyond the first pin of each block."""
        self.fresh: list[BlockId] | None = None
        """Blocks that have become cached since the tiers last cleared the list. None: the host has no tiers."""
        self.fresh_when: Writes = "cached"
        """`sealed`: blocks are also added when they are sealed."""

    @property
    def free(self) -> int:
        return len(self._free) + self.unused

    @property
    def cached(self) -> int:
        return len(self._eviction)

    @property
    def used(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Number of blocks that `take` can return: free blocks and cached blocks."""
        return len(self._free) + self.unused + len(self._eviction)

    def hit(self, hashes: Sequence[BlockHash], window: Window | None, block_tokens: int, first: int = 0) -> Hit:
        """Return the longest prefix hit, unpinned. Blocks before `first` need not be held; see `longest_hit`."""
        by_hash = self._by_hash
        count = longest_hit((block_hash in by_hash for block_hash in hashes), window, block_tokens, first)
        behind = max(first, behind_blocks(window, count * block_tokens, block_tokens))
        return Hit(behind, [by_hash[block_hash] for block_hash in hashes[behind:count]])

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the block with this hash, or None."""
        return self._by_hash.get(block_hash)

    @property
    def hashed(self) -> int:
        """Number of sealed blocks, pinned or not."""
        return len(self._by_hash)

    @property
    def hashes(self) -> KeysView[BlockHash]:
        """Hashes of all sealed blocks."""
        return self._by_hash.keys()

    @property
    def sealed(self) -> list[tuple[BlockId, BlockFacts]]:
        """All sealed blocks with their metadata, pinned or not."""
        return [(BlockId(block), facts) for block, facts in enumerate(self._facts) if facts is not None]

    def unpinned(self, blocks: Iterable[BlockId]) -> int:
        """Count the blocks without a pin. Using them as a prefix hit reduces `available` by this number."""
        return [self._pins[block] for block in blocks].count(0)

    def pin(self, blocks: Iterable[BlockId], uses: int = 1) -> None:
        """Pin sealed blocks for one more reader. `uses` is 0 for readers that are not requests, such as tier writes."""
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
        """Remove a block's hash, since its content is invalid. Return the hash, if it had one.

        Existing pins stay; the block is freed with its last pin.
        """
        facts = self._facts[block]
        if facts is None:
            return None
        if self._pins[block] == 0:
            self._eviction.remove(block)
            self._release(block)
        del self._by_hash[facts.block_hash]
        self._facts[block] = None
        return facts.block_hash

    def take(self, count: int) -> tuple[list[BlockId], list[BlockHash]]:
        """Pin `count` empty blocks for one request and evict cached blocks as needed. Requires count <= available.

        Return the blocks and the hashes of evicted blocks.
        """
        assert count <= self.available, f"asked for {count} blocks of {self.available} available"
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        if len(taken) < count and self.unused:
            taken += self._first_use(count - len(taken))
        evicted: list[BlockHash] = []
        while len(taken) < count:
            evicted.append(self._evict())
            taken.append(self._free.pop())
        return taken, evicted

    def seal(self, block: BlockId, facts: BlockFacts) -> bool:
        """Seal a full block under its hash. Return False if the hash is taken or the block is sealed already."""
        assert self._pins[block] > 0, f"block {block} is sealed without a pin"
        if facts.block_hash in self._by_hash or self._facts[block] is not None:
            return False
        self._by_hash[facts.block_hash] = block
        self._facts[block] = facts
        if self.fresh is not None and self.fresh_when == "sealed":
            self.fresh.append(block)
        return True

    def facts(self, block: BlockId) -> BlockFacts | None:
        """Return the metadata of a sealed block. None: the block is not sealed."""
        return self._facts[block]

    def unpin(self, blocks: Sequence[BlockId]) -> None:
        """Remove one request's pins. A sealed block without pins becomes cached, any other block free.

        Runs back to front, so that the deepest block of a request is evicted first: more prompts share the front.
        """
        pins, facts = self._pins, self._facts
        if not self._by_hash and not self._shared:
            self._free.extend(reversed(blocks))  # fast path: no block is sealed or shared
            assert self.available <= self.total, "blocks are unpinned more often than they were pinned"
            return
        last = max(blocks, default=0)
        assert last < len(pins), f"block {last} is unpinned more often than it was pinned"
        for block in reversed(blocks):
            left = pins[block] = pins[block] - 1
            if left:
                assert left > 0, f"block {block} is unpinned more often than it was pinned"
                self._shared -= 1
            elif (known := facts[block]) is None:
                self._release(block)
            else:
                self._eviction.add(block, known)
                if self.fresh is not None:
                    self.fresh.append(block)

    def _first_use(self, count: int) -> list[BlockId]:
        """Return at most `count` blocks that were never taken, and begin their metadata."""
        first, count = len(self._pins), min(count, self.unused)
        self.unused -= count
        self._free_index += [0] * count
        self._pins += [1] * count
        self._facts += [None] * count
        return cast("list[BlockId]", list(range(first, first + count)))

    def _evict(self) -> BlockHash:
        block = self._eviction.pop()
        facts = self._facts[block]
        assert facts is not None, f"cached block {block} has no hash"
        del self._by_hash[facts.block_hash]
        self._facts[block] = None
        self._release(block)
        return facts.block_hash

    def _release(self, block: BlockId) -> None:
        free, index = self._free, self._free_index[block]
        assert index >= len(free) or free[index] != block, f"block {block} is unpinned more often than it was pinned"
        self._free_index[block] = len(free)
        free.append(block)
        self._pins[block] = 1

    def check(self, pins_expected: Sequence[int]) -> None:
        """Assert INV-4 and that the pins match those of the requests. For tests, checkers and idle time."""
        free, known = set(self._free), len(self._pins)
        assert len(pins_expected) == self.total == known + self.unused, "the blocks are not as many as at the start"
        assert not any(pins_expected[known:]), "a request holds a block that was never taken"
        for block, (expected, pins) in enumerate(zip(pins_expected[:known], self._pins, strict=True)):
            assert pins == (1 if block in free else expected), f"pins of block {block} are not those of the requests"
        assert self._shared == sum(pins - 1 for pins in self._pins if pins), "the count of shared pins is wrong"
        assert len(free) == len(self._free), "a block is free twice"
        for block in range(known):
            is_sealed = self._facts[block] is not None
            pinned = pins_expected[block] > 0
            assert (block in free) == (not is_sealed and not pinned), f"block {block} is lost or free while in use"
        cached = sum(facts is not None and not pins for facts, pins in zip(self._facts, self._pins, strict=True))
        assert cached == len(self._eviction), "the eviction order does not hold exactly the cached blocks"
        by_hash = {facts.block_hash: block for block, facts in enumerate(self._facts) if facts is not None}
        assert by_hash == self._by_hash, "the hash index has a wrong block"
