"""Which block lies in which slot of a pool node, what its machine sees of that, and which slots wait for a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.types import BlockHash
from baton.move.store.node_board import BlockBoard
from baton.move.store.slot_table import SlotTable

SLOTS_A_SPARE = 64
"""Of so many slots one may wait for a client to fill it."""


@dataclass(slots=True, eq=False)
class Spare:
    """The slot that one client may fill without asking, if it has one."""

    slot: int | None = None


class NodeSlots:
    """Bookkeeping, guarded by its owner's lock."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        """Raises OSError where there is no memory for the board."""
        self.block_bytes = block_bytes
        self.table = SlotTable()
        self.table.add_free(range(slots))
        self.board = BlockBoard(slots)
        self.checksums = [b""] * slots
        self._spares_left = slots // SLOTS_A_SPARE
        self._is_full = False
        """The last slot that was taken was another block's."""

    def reserve(self, names: Sequence[BlockHash], spare: Spare) -> dict[BlockHash, int]:
        """Find slots for those of these blocks that are not there, as far as there are any. The others count as young.

        The client's spare slot is one of them.
        """
        new = [name for name in dict.fromkeys(names) if not self.table.refresh(name)]
        if not new:
            return {}
        own = self._taken_back(spare)
        return dict(zip(new, sorted([*own, *self._taken(len(new) - len(own))]), strict=False))

    def keep(self, name: BlockHash, slot: int, checksum: bytes) -> None:
        """Name a slot that was reserved, and whose bytes have come."""
        self.checksums[slot] = checksum
        if self.table.keep(name, slot):
            self.board.post(name, checksum, slot * self.block_bytes, self.table.holds)

    def keep_spare(self, name: BlockHash, spare: Spare, checksum: bytes) -> bool:
        """Name a client's spare slot, which it has filled. False: the block is there already, and the slot stays spare.

        Raises ValueError where it has none.
        """
        if spare.slot is None:
            raise ValueError("a block for a slot that was lent to nobody")
        if self.table.refresh(name):
            return False
        (slot,) = self._taken_back(spare)
        self.keep(name, slot, checksum)
        return True

    def lend_spare(self, spare: Spare) -> None:
        """Give a client a slot for its next block: a free one, or the oldest block's once blocks must make room anyway.

        So a node keeps as many blocks as it has slots, until it gets one more.
        """
        if spare.slot is None and self._spares_left and (self.table.free_slots() or self._is_full):
            spare.slot = next(iter(self._taken(1)), None)
            self._spares_left -= spare.slot is not None

    def end_spare(self, spare: Spare) -> None:
        """The client has ended: its slot is free again."""
        self.table.add_free(self._taken_back(spare))

    def drop(self, name: BlockHash) -> bool:
        """Forget a block. Returns whether it was there."""
        self.board.clear(name)
        return self.table.forget(name)

    def _taken_back(self, spare: Spare) -> list[int]:
        slot, spare.slot = spare.slot, None
        self._spares_left += slot is not None
        return [] if slot is None else [slot]

    def _taken(self, count: int) -> list[int]:
        """Take free slots, and then those of the oldest blocks."""
        slots, forgotten = self.table.reserve(count)
        self._is_full = forgotten > 0 or (self._is_full and not slots)
        return slots
