"""Read and write blocks in slots, with checksums. Adjacent slots are combined into runs of one system call each.

A large block is read in parts in parallel, so that the checksum of one part overlaps with the reads of others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from baton.core.types import BlockHash
from baton.move.store.checksum import PART_BYTES, checksum, checksum_in_parts, joined
from baton.move.store.direct_io import Scratch, Scratches, copy_bytes, is_aligned, transfer_all
from baton.move.store.segments import Segments, padded_bytes
from baton.move.store.slot_header import ALIGNMENT_BYTES, SlotHeader, is_empty, read_header

RUN_BYTES = 4 << 20
"""Size of a read or write at which a disk reaches its full speed. A single block may be larger."""
_RUN_SLOTS_MAX = 256
"""Maximum slots per run: a slot needs up to three buffers, and one system call accepts 1,024."""

Outcome = Literal["whole", "damaged", "failed"]
Work = Callable[[], OSError | None]
"""One read or write of a run, for any thread. Returns the error, if any."""


@dataclass(slots=True)
class SlotTask:
    """Read or write of one block."""

    slot: int
    block_hash: BlockHash
    memory: memoryview
    sequence: int = 0
    outcome: Outcome = "failed"


@dataclass(slots=True, eq=False)
class _PartialRead:
    """Read of a large block in parts."""

    task: SlotTask
    sums: list[bytes]
    """Checksums of the parts. Empty bytes: not read, or cut off by the end of the file."""
    missing: int
    """Parts that are not finished."""
    header: SlotHeader | None = None
    failed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class SlotIo:
    """Prepare reads and writes of slots. Any number of threads may execute them; each run borrows a scratch."""

    def __init__(self, segments: Segments, *, layout: bytes, block_bytes: int) -> None:
        self._segments = segments
        self._layout = layout
        self._block_bytes = block_bytes
        self._padded_bytes = padded_bytes(block_bytes)
        self._run_slots = max(1, min(_RUN_SLOTS_MAX, RUN_BYTES // segments.slot_bytes))
        self._scratches = Scratches(run_slots=self._run_slots, padded_bytes=self._padded_bytes)
        self._part_scratches = Scratches(run_slots=1, padded_bytes=PART_BYTES)

    def writes(self, tasks: Sequence[SlotTask]) -> list[Work]:
        """Return the calls that write these blocks and set their outcomes, in the order of the slots."""
        return [partial(self._write, run) for run in self._runs(tasks)]

    def reads(self, tasks: Sequence[SlotTask]) -> list[Work]:
        """Return the calls that read and verify these blocks and set their outcomes, in the order of the slots."""
        runs = self._runs(tasks)
        if self._padded_bytes <= PART_BYTES:
            return [partial(self._read, run) for run in runs]
        parts = -(-self._padded_bytes // PART_BYTES)
        reading = [_PartialRead(task, [b""] * parts, parts) for run in runs for task in run]
        return [partial(self._read_part, each, part) for each in reading for part in range(parts)]

    def _runs(self, tasks: Sequence[SlotTask]) -> list[list[SlotTask]]:
        """Group tasks into runs of adjacent slots."""
        runs: list[list[SlotTask]] = []
        for task in sorted(tasks, key=lambda task: task.slot):
            last = runs[-1] if runs else []
            if last and len(last) < self._run_slots and self._segments.are_adjacent(last[-1].slot, task.slot):
                last.append(task)
            else:
                runs.append([task])
        return runs

    def _write(self, run: list[SlotTask]) -> OSError | None:
        try:
            with self._scratches.borrowed() as scratch:
                memories: list[memoryview] = []
                for index, task in enumerate(run):
                    self._header_of(task).pack_into(scratch.header(index))
                    memories += [scratch.header(index), *self._payload(task, scratch, index, fill=True)]
                fd, offset_bytes = self._segments.place(run[0].slot)
                moved = transfer_all(os.pwritev, fd, memories, offset_bytes)
        except OSError as error:
            return error
        for index, task in enumerate(run):
            if moved >= (index + 1) * self._segments.slot_bytes:
                task.outcome = "whole"
        return None

    def _read(self, run: list[SlotTask]) -> OSError | None:
        """Read a run. One unreadable slot fails the whole system call: then read each slot by itself."""
        error = self._read_run(run)
        if error is None or len(run) == 1:
            return error
        errors = [self._read_run([task]) for task in run]
        return next((error for error in errors if error is not None), None)

    def _read_run(self, run: list[SlotTask]) -> OSError | None:
        try:
            with self._scratches.borrowed() as scratch:
                memories: list[memoryview] = []
                for index, task in enumerate(run):
                    memories += [scratch.header(index), *self._payload(task, scratch, index, fill=False)]
                fd, offset_bytes = self._segments.place(run[0].slot)
                moved = transfer_all(os.preadv, fd, memories, offset_bytes)
                for index, task in enumerate(run):
                    whole = moved >= (index + 1) * self._segments.slot_bytes
                    task.outcome = "whole" if whole and self._verified(task, scratch, index) else "damaged"
        except OSError as error:
            return error
        return None

    def _read_part(self, reading: _PartialRead, part: int) -> OSError | None:
        """Read one part of a large block. The last part sets the outcome."""
        error: OSError | None = None
        try:
            with self._part_scratches.borrowed() as scratch:
                reading.sums[part] = self._sum_of_part(reading, part, scratch)
        except OSError as failure:
            error = failure
        with reading.lock:
            reading.failed |= error is not None
            reading.missing -= 1
            is_last = not reading.missing
        if is_last and not reading.failed:
            reading.task.outcome = "whole" if self._is_whole(reading) else "damaged"
        return error

    def _sum_of_part(self, reading: _PartialRead, part: int, scratch: Scratch) -> bytes:
        """Read a part, the first one with the header. Return its checksum, or b"" if the file ends before."""
        start = part * PART_BYTES
        memory = reading.task.memory[start : start + PART_BYTES]
        in_place = self._in_place(reading.task)
        into = memory if in_place else scratch.block(0)[: min(PART_BYTES, self._padded_bytes - start)]
        before = [scratch.header(0)] if part == 0 else []
        fd, offset_bytes = self._segments.place(reading.task.slot)
        skipped_bytes = start + (0 if part == 0 else ALIGNMENT_BYTES)
        moved = transfer_all(os.preadv, fd, [*before, into], offset_bytes + skipped_bytes)
        if moved < into.nbytes + sum(header.nbytes for header in before):
            return b""
        if part == 0:
            reading.header = self._own_header(reading.task, scratch.header(0))
        if not in_place:
            copy_bytes(memory, into[: memory.nbytes])
        return checksum(memory)

    def _is_whole(self, reading: _PartialRead) -> bool:
        header = reading.header
        return header is not None and all(reading.sums) and joined(reading.sums) == header.payload_checksum

    def read_header(self, slot: int) -> SlotHeader | Literal["empty", "damaged"]:
        """Read the header of a slot without its block. Raises OSError."""
        with self._scratches.borrowed() as scratch:
            fd, offset_bytes = self._segments.place(slot)
            header = scratch.header(0)
            if transfer_all(os.preadv, fd, [header], offset_bytes) < ALIGNMENT_BYTES:
                return "damaged"
            if is_empty(header):
                return "empty"
            found = read_header(header, layout=self._layout, slot=slot)
            return "damaged" if found is None or found.size_bytes != self._block_bytes else found

    def _header_of(self, task: SlotTask) -> SlotHeader:
        return SlotHeader(
            layout=self._layout,
            slot=task.slot,
            sequence=task.sequence,
            size_bytes=self._block_bytes,
            block_hash=task.block_hash,
            payload_checksum=checksum_in_parts(task.memory),
        )

    def _in_place(self, task: SlotTask) -> bool:
        return self._padded_bytes == self._block_bytes and (
            self._segments.mode == "buffered" or is_aligned(task.memory)
        )

    def _payload(self, task: SlotTask, scratch: Scratch, index: int, *, fill: bool) -> list[memoryview]:
        if self._in_place(task):
            return [task.memory]
        block = scratch.block(index)
        if fill:
            copy_bytes(block[: self._block_bytes], task.memory)
        return [block]

    def _verified(self, task: SlotTask, scratch: Scratch, index: int) -> bool:
        header = self._own_header(task, scratch.header(index))
        if header is None:
            return False
        if not self._in_place(task):
            copy_bytes(task.memory, scratch.block(index)[: self._block_bytes])
        return checksum(task.memory) == header.payload_checksum

    def _own_header(self, task: SlotTask, memory: memoryview) -> SlotHeader | None:
        """Return the header of the task's block, or None if it is damaged or of another block."""
        header = read_header(memory, layout=self._layout, slot=task.slot)
        is_own = header is not None and header.block_hash == task.block_hash and header.size_bytes == self._block_bytes
        return header if is_own else None
