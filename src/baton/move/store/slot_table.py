"""Which block lies in which slot of a file store: names, ages, free slots, and who is reading."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable

from baton.core.types import BlockHash


class SlotTable:
    """Pure bookkeeping, guarded by its owner's lock. A slot that is being read is not given away until it was read."""

    def __init__(self) -> None:
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        self._free: list[int] = []
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()
        """Forgotten, but still being read: free as soon as the last reader is done."""

    def items(self) -> list[tuple[BlockHash, int]]:
        """Blocks and their slots, oldest first."""
        return list(self._slots.items())

    def holds(self, name: BlockHash) -> bool:
        return name in self._slots

    def refresh(self, name: BlockHash) -> bool:
        """Count a block as young again. Returns whether it is there."""
        if name not in self._slots:
            return False
        self._slots.move_to_end(name)
        return True

    def free_slots(self) -> int:
        return len(self._free)

    def add_free(self, slots: Iterable[int]) -> None:
        """Take new slots, or such that were reserved and hold nothing."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def begin_read(self, name: BlockHash) -> int | None:
        """Find a block's slot, and keep it from being written until `end_read`."""
        slot = self._slots.get(name)
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
        """Take up to `count` slots, in order: the lowest free ones, then those of the oldest blocks.

        Returns them and how many blocks were forgotten for it.
        """
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        forgotten = 0
        for _ in range(len(self._slots)):
            if len(taken) == count:
                break
            name, slot = self._slots.popitem(last=False)
            if slot in self._readers:
                self._slots[name] = slot  # wanted just now: young again
                continue
            taken.append(slot)
            forgotten += 1
        return sorted(taken), forgotten

    def keep(self, name: BlockHash, slot: int) -> bool:
        """Name a slot that was reserved and written. False: the block came twice, and this slot is free again."""
        if name in self._slots:
            heapq.heappush(self._free, slot)
            return False
        self._slots[name] = slot
        return True

    def forget(self, name: BlockHash, *, slot: int | None = None) -> bool:
        """Drop a block; with `slot`, only if it lies there. Returns whether it was there."""
        found = self._slots.get(name)
        if found is None or slot not in (None, found):
            return False
        del self._slots[name]
        if found in self._readers:
            self._leaving.add(found)
        else:
            heapq.heappush(self._free, found)
        return True
