"""Blocks in and out of slots: runs of adjacent ones in one call each, checked on the way in and on the way out."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from baton.core.types import BlockHash
from baton.store.checksum import checksum
from baton.store.direct_io import Scratch, copy_bytes, is_aligned, transfer_all
from baton.store.segments import Segments, padded_bytes
from baton.store.slot_header import ALIGNMENT_BYTES, SlotHeader, is_empty, read_header

RUN_BYTES = 4 << 20
"""Largest read or write, unless a single block is larger: what a disk needs to run at its limit."""
_RUN_SLOTS_MAX = 256
"""Three memories a slot at most, of 1,024 that one call takes."""

Outcome = Literal["whole", "damaged", "failed"]


@dataclass(slots=True)
class SlotTask:
    """One block that goes into a slot or comes out of it."""

    slot: int
    name: BlockHash
    memory: memoryview
    sequence: int = 0
    outcome: Outcome = "failed"


class SlotIo:
    """Reads and writes runs of slots. Any number of threads may be in here; each run borrows a scratch."""

    def __init__(self, segments: Segments, *, layout: bytes, block_bytes: int) -> None:
        self._segments = segments
        self._layout = layout
        self._block_bytes = block_bytes
        self._padded_bytes = padded_bytes(block_bytes)
        self._run_slots = max(1, min(_RUN_SLOTS_MAX, RUN_BYTES // segments.slot_bytes))
        self._scratches: queue.LifoQueue[Scratch] = queue.LifoQueue()

    def runs(self, tasks: Sequence[SlotTask]) -> list[list[SlotTask]]:
        """Cut tasks into runs of adjacent slots, each for one call."""
        runs: list[list[SlotTask]] = []
        for task in sorted(tasks, key=lambda task: task.slot):
            last = runs[-1] if runs else []
            if last and len(last) < self._run_slots and self._segments.are_adjacent(last[-1].slot, task.slot):
                last.append(task)
            else:
                runs.append([task])
        return runs

    def write(self, run: list[SlotTask]) -> OSError | None:
        """Write a run and set the outcome of each task. Returns what went wrong, if anything did."""
        scratch = self._borrow()
        try:
            memories: list[memoryview] = []
            for index, task in enumerate(run):
                self._header_of(task).pack_into(scratch.header(index))
                memories += [scratch.header(index), *self._payload(task, scratch, index, fill=True)]
            fd, offset_bytes = self._segments.place(run[0].slot)
            moved = transfer_all(os.pwritev, fd, memories, offset_bytes)
        except OSError as error:
            return error
        finally:
            self._scratches.put(scratch)
        for index, task in enumerate(run):
            if moved >= (index + 1) * self._segments.slot_bytes:
                task.outcome = "whole"
        return None

    def read(self, run: list[SlotTask]) -> OSError | None:
        """Read and verify a run, and set the outcome of each task. Returns what went wrong, if anything did.

        A disk that cannot give one of the slots fails the whole call: then each is read by itself.
        """
        error = self._read_run(run)
        if error is None or len(run) == 1:
            return error
        errors = [self._read_run([task]) for task in run]
        return next((error for error in errors if error is not None), None)

    def _read_run(self, run: list[SlotTask]) -> OSError | None:
        scratch = self._borrow()
        try:
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
        finally:
            self._scratches.put(scratch)
        return None

    def read_header(self, slot: int) -> SlotHeader | Literal["empty", "damaged"]:
        """Look at what a slot says about itself, without reading its block. Raises OSError."""
        scratch = self._borrow()
        try:
            fd, offset_bytes = self._segments.place(slot)
            header = scratch.header(0)
            if transfer_all(os.preadv, fd, [header], offset_bytes) < ALIGNMENT_BYTES:
                return "damaged"
            if is_empty(header):
                return "empty"
            found = read_header(header, layout=self._layout, slot=slot)
            return "damaged" if found is None or found.size_bytes != self._block_bytes else found
        finally:
            self._scratches.put(scratch)

    def _header_of(self, task: SlotTask) -> SlotHeader:
        return SlotHeader(
            layout=self._layout,
            slot=task.slot,
            sequence=task.sequence,
            size_bytes=self._block_bytes,
            name=task.name,
            payload_checksum=checksum(task.memory),
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
        header = read_header(scratch.header(index), layout=self._layout, slot=task.slot)
        if header is None or header.name != task.name or header.size_bytes != self._block_bytes:
            return False
        if not self._in_place(task):
            copy_bytes(task.memory, scratch.block(index)[: self._block_bytes])
        return checksum(task.memory) == header.payload_checksum

    def _borrow(self) -> Scratch:
        try:
            return self._scratches.get_nowait()
        except queue.Empty:
            return Scratch(run_slots=self._run_slots, padded_bytes=self._padded_bytes)
