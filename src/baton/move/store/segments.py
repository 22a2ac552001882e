"""Segment files of a file store: a few large files, divided into slots of one block each, that grow in steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import StoreError
from baton.move.store.direct_io import IoMode, open_segment
from baton.move.store.slot_header import ALIGNMENT_BYTES

SEGMENT_BYTES = 4 << 30
"""Size of one file: a terabyte has 256 files, all of them open."""
GROWTH_BYTES = 256 << 20
"""Bytes that are allocated at a time, when all slots are used."""


def padded_bytes(block_bytes: int) -> int:
    """Return a block's size, rounded up to the alignment of direct I/O."""
    return -(-block_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(block_bytes: int) -> int:
    """Return the bytes of one slot: header, block and padding."""
    return ALIGNMENT_BYTES + padded_bytes(block_bytes)


@dataclass(slots=True)
class _Segment:
    fd: int
    slots: int
    """Slots that are allocated."""
    slots_max: int


class Segments:
    """The slots of a store. The place of a slot does not depend on the capacity, which may change between runs."""

    def __init__(self, folder: Path, *, block_bytes: int, slots_max: int, mode: IoMode) -> None:
        """Open or create the files, and cut off slots above `slots_max`. Raises StoreError if a file cannot be used."""
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
        """Return the numbers of all allocated slots."""
        return [
            number * self._segment_slots + index
            for number, segment in enumerate(self._segments)
            for index in range(segment.slots)
        ]

    def place(self, slot: int) -> tuple[int, int]:
        """Return the file descriptor of a slot, and its offset in bytes."""
        number, index = divmod(slot, self._segment_slots)
        return self._segments[number].fd, index * self.slot_bytes

    def are_adjacent(self, slot: int, next_slot: int) -> bool:
        return next_slot == slot + 1 and next_slot % self._segment_slots != 0

    def grow(self) -> range:
        """Allocate the next slots and return their numbers; empty if all are allocated.

        Raises OSError once if the disk is full. After that, the segments do not grow any more.
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
        """Allocate slots, and halve the number while the disk has no room for them. Return the number allocated."""
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
        """Wait until written data is durable."""
        for segment in self._segments:
            os.fdatasync(segment.fd)

    def close(self) -> None:
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()


def _file_name(number: int) -> str:
    return f"segment-{number:04d}.kv"
