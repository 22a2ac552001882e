"""Complete vectored reads and writes, with direct I/O if the file system supports it."""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from baton.core.files import open_private_fd
from baton.move.store.slot_header import ALIGNMENT_BYTES

IoMode = Literal["direct", "buffered"]


def open_segment(path: Path, mode: IoMode) -> tuple[int, IoMode]:
    """Open or create a file for reading and writing. Return its descriptor and the actual mode.

    On a file system without direct I/O (tmpfs of an older kernel), the mode is "buffered".
    """
    flags = os.O_RDWR | os.O_CREAT
    if mode == "direct" and hasattr(os, "O_DIRECT"):
        try:
            return open_private_fd(path, flags | os.O_DIRECT), "direct"
        except OSError:
            pass  # direct I/O is not supported; the next call raises any other error
    return open_private_fd(path, flags), "buffered"


class Scratch:
    """Aligned memory for one run of slots: their headers, and copies of blocks whose own memory is not aligned."""

    def __init__(self, *, run_slots: int, padded_bytes: int) -> None:
        self._padded_bytes = padded_bytes
        self._run_slots = run_slots
        self._headers = _aligned(run_slots * ALIGNMENT_BYTES)
        self._blocks: memoryview | None = None

    def header(self, index: int) -> memoryview:
        return self._headers[index * ALIGNMENT_BYTES : (index + 1) * ALIGNMENT_BYTES]

    def block(self, index: int) -> memoryview:
        if self._blocks is None:
            self._blocks = _aligned(self._run_slots * self._padded_bytes)
        return self._blocks[index * self._padded_bytes : (index + 1) * self._padded_bytes]


class Scratches:
    """Pool of idle scratches of one size, for any number of threads."""

    def __init__(self, *, run_slots: int, padded_bytes: int) -> None:
        self._run_slots = run_slots
        self._padded_bytes = padded_bytes
        self._spare: queue.LifoQueue[Scratch] = queue.LifoQueue()
        """Bounded by the largest number of concurrent threads."""

    @contextmanager
    def borrowed(self) -> Iterator[Scratch]:
        """Borrow a scratch. Raises OSError if there is no memory for another one."""
        try:
            scratch = self._spare.get_nowait()
        except queue.Empty:
            scratch = Scratch(run_slots=self._run_slots, padded_bytes=self._padded_bytes)
        try:
            yield scratch
        finally:
            self._spare.put(scratch)


def _aligned(size_bytes: int) -> memoryview:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, max(size_bytes, ALIGNMENT_BYTES), flags=flags))


def is_aligned(memory: memoryview) -> bool:
    """Return whether direct I/O can read and write this memory in place."""
    address, _ = np.frombuffer(memory, np.uint8).__array_interface__["data"]
    return address % ALIGNMENT_BYTES == 0 and memory.nbytes % ALIGNMENT_BYTES == 0


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy without the interpreter's lock, which a slice assignment would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def transfer_all(call: Callable[..., int], fd: int, memories: Sequence[memoryview], offset_bytes: int) -> int:
    """Repeat os.preadv or os.pwritev until all memories are done or the file ends. Return the bytes moved."""
    waiting, moved = list(memories), 0
    while waiting:
        step_bytes = call(fd, waiting, offset_bytes + moved)
        moved += step_bytes
        if step_bytes == 0:
            break
        while waiting and step_bytes >= waiting[0].nbytes:
            step_bytes -= waiting.pop(0).nbytes
        if step_bytes:
            waiting[0] = waiting[0][step_bytes:]
    return moved
