"""Table of blocks and slots of a store: hashes, ages, free slots and readers."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton.core.types import BlockHash


class SlotTable:
    """Bookkeeping only; the owner holds a lock. A slot is not reused while it is being read."""

    def __init__(self) -> None:
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free: list[int] = []
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()
        """Slots of removed blocks that are still being read. They become free when the last reader is done."""

    def items(self) -> list[tuple[BlockHash, int]]:
        """Return blocks and their slots, oldest first."""
        return list(self._slots.items())

    def holds(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots

    def refresh(self, block_hash: BlockHash) -> bool:
        """Make a block the youngest. Return whether it exists."""
        if block_hash not in self._slots:
            return False
        self._slots.move_to_end(block_hash)
        return True

    def free_slots(self) -> int:
        return len(self._free)

    def add_free(self, slots: Iterable[int]) -> None:
        """Add new slots, or return reserved slots that were not written."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def begin_read(self, block_hash: BlockHash) -> int | None:
        """Return a block's slot and pin it until `end_read`. Return None if the block is missing."""
        slot = self._slots.get(block_hash)
        if slot is not None:
            self._readers[slot] += 1
        return slot

    def end_read(self, slot: int) -> None:
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
            if slot in self._leaving:
                self._leaving.remove(slot)
                heapq.heappush(self._free, slot)

    def reserve(self, count: int) -> tuple[list[int], int]:
        """Reserve up to `count` slots: the lowest free ones, then those of the oldest blocks.

        Return them in order, and how many blocks were evicted.
        """
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        forgotten = 0
        for _ in range(len(self._slots)):
            if len(taken) == count:
                break
            block_hash, slot = self._slots.popitem(last=False)
            if slot in self._readers:
                self._slots[block_hash] = slot  # it is being read, so it becomes the youngest
                continue
            taken.append(slot)
            forgotten += 1
        return sorted(taken), forgotten

    def keep(self, block_hash: BlockHash, slot: int) -> bool:
        """Assign a written slot to its block. Return False if the block exists already: then the slot is free again."""
        if block_hash in self._slots:
            heapq.heappush(self._free, slot)
            return False
        self._slots[block_hash] = slot
        return True

    def forget(self, block_hash: BlockHash, *, slot: int | None = None) -> bool:
        """Remove a block; with `slot`, only if it is in that slot. Return whether it was removed."""
        found = self._slots.get(block_hash)
        if found is None or slot not in (None, found):
            return False
        del self._slots[block_hash]
        if found in self._readers:
            self._leaving.add(found)
        else:
            heapq.heappush(self._free, found)
        return True
