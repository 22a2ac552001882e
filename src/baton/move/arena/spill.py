"""The bytes of a host's spill space: memory or a file that every worker of the host maps, [layers, slots, layer bytes].

All slots of a layer are adjacent, because a step reads one layer after the other. Workers read slots where they lie.
For a file, the system's page cache holds what was read, and a thread asks the system to read the layers in advance.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from baton.core.errors import ArenaError
from baton.core.files import make_private_folder
from baton.core.spill import SPILLED_FROM, spilled_blocks
from baton.core.step import Step
from baton.decide.kv.layout import KVLayout


def create_spill(folder: str, bytes_total: int) -> int:
    """Reserve a spill space and return its descriptor. Raises ArenaError if the folder is unusable, or room is missing.

    folder: place of a file without a name, which is gone with the last process that has it open. Empty: memory.
    """
    try:
        if folder:
            make_private_folder(Path(folder))
            with tempfile.TemporaryFile(prefix="baton-spill", dir=folder) as file:
                descriptor = os.dup(file.fileno())
        else:
            descriptor = os.memfd_create("baton-spill", os.MFD_CLOEXEC)
    except OSError as error:
        raise ArenaError(f"kv.spill.folder {folder!r} cannot be used: {error}") from error
    try:
        os.posix_fallocate(descriptor, 0, bytes_total)
    except OSError as error:
        os.close(descriptor)
        where = f"the file system of {folder}" if folder else "memory"
        raise ArenaError(
            f"kv.spill needs {bytes_total / 2**30:.2f} GiB of {where}: {error.strerror}; lower kv.spill.bytes"
        ) from error
    return descriptor


class SpillMemory:
    """A worker's mapping of the spill space."""

    def __init__(self, descriptor: int, layout: KVLayout, slots: int) -> None:
        """Take over the descriptor. Raises ArenaError if its size is not that of the slots."""
        wanted, held = slots * layout.block_bytes, os.fstat(descriptor).st_size
        if held != wanted:
            raise ArenaError(f"the spill space has {held} bytes, but {wanted} were announced; restart the server")
        self._descriptor, self._layout, self._slots = descriptor, layout, slots
        self.memory = memoryview(mmap.mmap(descriptor, held, flags=mmap.MAP_SHARED))
        self._layers = np.frombuffer(self.memory, np.uint8).reshape(layout.layers, slots, -1)
        self._reader = ThreadPoolExecutor(1, "spill")
        self._reading: Future[None] | None = None

    def write(self, arena: memoryview, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks of the arena to slots."""
        whole = len(arena) // self._layout.block_bytes
        source = np.frombuffer(arena, np.uint8)[: whole * self._layout.block_bytes]
        source = source.reshape(whole, self._layout.layers, -1)  # [blocks, layers, layer bytes]
        self._layers[:, list(slots)] = source[list(blocks)].swapaxes(0, 1)

    def read_ahead(self, step: Step) -> None:
        """Ask the system to read the slots of a step, layer by layer. Does nothing while an earlier call still asks."""
        slots = [block - SPILLED_FROM for part in step.slices for block in _spilled(part.block_table)]
        if slots and (self._reading is None or self._reading.done()):
            self._reading = self._reader.submit(self._advise, sorted(set(slots)))

    def _advise(self, slots: Sequence[int]) -> None:
        layer_bytes = self._layers.shape[2]
        for layer in range(self._layout.layers):
            for first, count in _runs(slots):
                at = (layer * self._slots + first) * layer_bytes
                os.posix_fadvise(self._descriptor, at, count * layer_bytes, os.POSIX_FADV_WILLNEED)


def _spilled(table: Sequence[int]) -> Sequence[int]:
    return table[: spilled_blocks(table)]


def _runs(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of adjacent slots as pairs (first, count). slots: ascending."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs
