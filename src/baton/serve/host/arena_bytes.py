"""Read and write the KV blocks of an arena in host or device memory, on behalf of tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena
from baton.move.arena.cuda_memory import CudaMemory
from baton.move.arena.memfd import Arena
from baton.move.copies import fastest_copy
from baton.move.transport.copier import copy_portions
from baton.move.transport.extents import Spread
from baton.move.transport.port import Memory
from baton.move.transport.staged import StagedMemory

Blocks = npt.NDArray[np.uint8]
"""Bytes of whole blocks: [blocks, block_bytes]."""


class ArenaBytes(Protocol):
    """Reads and writes whole blocks of one arena, from any thread. Two threads must not use one block at a time."""

    def read(self, blocks: Sequence[int]) -> Blocks:
        """Return copies of the blocks. Raises TransferError if the device fails, or after `close`."""
        ...

    def write(self, blocks: Sequence[int], contents: Blocks) -> None:
        """Fill blocks with `contents`. Raises TransferError if the device fails, or after `close`.

        After an error the content of the blocks is undefined.
        """
        ...

    def close(self) -> None:
        """Release the arena. Later calls fail."""
        ...


class HostBytes:
    """Implements `ArenaBytes` for an arena in host memory."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self._blocks = np.frombuffer(memory, np.uint8).reshape(-1, block_bytes)

    def read(self, blocks: Sequence[int]) -> Blocks:
        return self._open_blocks()[list(blocks)]

    def write(self, blocks: Sequence[int], contents: Blocks) -> None:
        self._open_blocks()[list(blocks)] = contents

    def close(self) -> None:
        self._blocks = self._blocks[:0].copy()

    def _open_blocks(self) -> Blocks:
        if not len(self._blocks):
            raise TransferError("the arena was closed under the copy")
        return self._blocks


class DeviceBytes:
    """Implements `ArenaBytes` for an arena on a device."""

    def __init__(self, memory: StagedMemory, block_bytes: int) -> None:
        self._memory: StagedMemory | None = memory
        self._block_bytes = block_bytes

    def read(self, blocks: Sequence[int]) -> Blocks:
        contents = np.empty((len(blocks), self._block_bytes), np.uint8)
        if blocks:
            _copy_whole(self._spread(blocks), _spread_of(contents))
        return contents

    def write(self, blocks: Sequence[int], contents: Blocks) -> None:
        if blocks:
            _copy_whole(_spread_of(contents), self._spread(blocks))

    def close(self) -> None:
        """Close the staged memory. The transports that use it must be closed before."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _spread(self, blocks: Sequence[int]) -> Spread:
        if self._memory is None:
            raise TransferError("the arena was closed under the copy")
        firsts = np.array(blocks, np.int64) * self._block_bytes
        rows = np.column_stack((firsts, np.full_like(firsts, self._block_bytes), np.zeros_like(firsts)))
        return Spread(rows, {0: self._memory})


def transferable(arena: Arena | CudaArena, layout: KVLayout) -> Memory:
    """Return an arena's memory in the form that transports use. Close a `StagedMemory` after the transports."""
    if isinstance(arena, Arena):
        return arena.memory
    return StagedMemory(CudaMemory(arena.parts, layout))


def bytes_of(memory: Memory, block_bytes: int) -> ArenaBytes:
    """Return access to an arena's blocks in the form that tiers use."""
    return DeviceBytes(memory, block_bytes) if isinstance(memory, StagedMemory) else HostBytes(memory, block_bytes)


def _spread_of(contents: Blocks) -> Spread:
    rows = np.array([[0, contents.nbytes, 0]], np.int64)
    return Spread(rows, {0: memoryview(contents.reshape(-1))})


def _copy_whole(source: Spread, target: Spread) -> None:
    copy_portions(fastest_copy(), source, target, range(source.size_bytes))
