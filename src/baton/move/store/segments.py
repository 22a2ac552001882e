"""The files of a file store: a few large ones, cut into slots of one block each, that grow piece by piece."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import StoreError
from baton.move.store.direct_io import IoMode, open_segment
from baton.move.store.slot_header import ALIGNMENT_BYTES

SEGMENT_BYTES = 4 << 30
"""Of one file: a terabyte is 256 of them, all open."""
GROWTH_BYTES = 256 << 20
"""Allocated at once, when the slots that there are have all been used."""


def padded_bytes(block_bytes: int) -> int:
    """A block's size, rounded up to what direct I/O reads."""
    return -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(block_bytes: int) -> int:
    """What a block takes on the disk: its header, itself, and what fills it up."""
    return ALIGNMENT_BYTES + padded_bytes(block_bytes)


@dataclass(slots=True)
class _Segment:
    fd: int
    slots: int
    """Allocated so far."""
    slots_max: int


class Segments:
    """Slots by number. A number means the same place whatever the capacity: it may change between two runs."""

    def __init__(self, folder: Path, *, block_bytes: int, slots_max: int, mode: IoMode) -> None:
        """Open what is there, remove what is above `slots_max`. Raises StoreError where a file cannot be used."""
        self.slot_bytes = slot_bytes(block_bytes)
        self.mode: IoMode = mode
        self._segment_slots = max(1, SEGMENT_BYTES // self.slot_bytes)
        self._growth_slots = max(1, GROWTH_BYTES // self.slot_bytes)
        self._segments: list[_Segment] = []
        self._full = False
        try:
            for number in range(-(-slots_max // self._segment_slots)):
                room = min(self._segment_slots, slots_max - number * self._segment_slots)
                self._open(folder / _file_name(number), room)
            self._remove_above(folder)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot open the segments of the KV store in {folder}: {error}") from None

    def _open(self, path: Path, room: int) -> None:
        fd, self.mode = open_segment(path, self.mode)
        self._segments.append(_Segment(fd, 0, room))
        if os.fstat(fd).st_size > room * self.slot_bytes:
            os.ftruncate(fd, room * self.slot_bytes)
        self._segments[-1].slots = os.fstat(fd).st_size // self.slot_bytes

    def _remove_above(self, folder: Path) -> None:
        number = len(self._segments)
        while (folder / _file_name(number)).exists():
            (folder / _file_name(number)).unlink()
            number += 1

    def allocated(self) -> list[int]:
        """Numbers of all slots that there are on the disk."""
        return [
            number * self._segment_slots + index
            for number, segment in enumerate(self._segments)
            for index in range(segment.slots)
        ]

    def place(self, slot: int) -> tuple[int, int]:
        """Find a slot: descriptor and offset in bytes."""
        number, index = divmod(slot, self._segment_slots)
        return self._segments[number].fd, index * self.slot_bytes

    def are_adjacent(self, slot: int, next_slot: int) -> bool:
        return next_slot == slot + 1 and next_slot % self._segment_slots != 0

    def grow(self) -> range:
        """Allocate the next slots. Returns them: none where all are allocated.

        Raises OSError, once, where the disk has no room for more; from then on there are no more slots than now.
        """
        for number, segment in enumerate([] if self._full else self._segments):
            count = min(self._growth_slots, segment.slots_max - segment.slots)
            if count == 0:
                continue
            count = self._allocate(segment, count)
            first = number * self._segment_slots + segment.slots
            segment.slots += count
            return range(first, first + count)
        return range(0)

    def _allocate(self, segment: _Segment, count: int) -> int:
        """Allocate slots; half as many where the disk has no room for all, and so on. Returns how many there are."""
        while True:
            try:
                os.posix_fallocate(segment.fd, segment.slots * self.slot_bytes, count * self.slot_bytes)
            except OSError:
                os.ftruncate(segment.fd, segment.slots * self.slot_bytes)
                if count == 1:
                    self._full = True
                    raise
                count //= 2
                continue
            return count

    def sync(self) -> None:
        """Wait until what was written would outlive a power failure."""
        for segment in self._segments:
            os.fdatasync(segment.fd)

    def close(self) -> None:
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()


def _file_name(number: int) -> str:
    return f"segment-{number:04d}.kv"
