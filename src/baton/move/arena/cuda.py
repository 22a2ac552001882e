"""A host's arena in device memory: one allocation per rank, which all workers map by CUDA IPC.

Its descriptor is a memfd, like that of an arena in host memory, but it holds the CUDA handles of the ranks instead of
the blocks. So workers receive both kinds in the same way. The server allocates, because it outlives its workers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import ArenaError
from baton.move.arena.cuda_driver import HANDLE_BYTES, CudaDriver


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Bytes on a device, which array libraries can use without a copy."""

    address: int
    bytes_total: int
    device: str
    """`cuda:N`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Describe the bytes. Source: CUDA Array Interface, version 3 (Numba's documentation)."""
        return {"shape": (self.bytes_total,), "typestr": "|u1", "data": (self.address, False), "version": 3}


@dataclass(frozen=True, slots=True)
class CudaPart:
    """An allocation on one device: a whole arena, or one rank's part of every block."""

    driver: CudaDriver
    array: DeviceArray


@dataclass(slots=True)
class CudaArena:
    """One mapping of an arena in device memory, or of the parts of it that this process computes on."""

    fd: int
    bytes_total: int
    """Size of the mapped parts."""
    parts: tuple[CudaPart, ...]
    """Mapped parts, by rank."""
    _owned: bool
    """This process has allocated the memory."""

    @property
    def memory(self) -> DeviceArray:
        """The bytes of the only mapped part: an arena on one device, or a rank's own part."""
        (part,) = self.parts
        return part.array

    @property
    def untouched_bytes(self) -> int:
        """Host memory that the arena will take: none."""
        return 0

    def prefault(self, start: int) -> int:
        """Return the end position: device memory is reserved when it is allocated."""
        return self.bytes_total

    def close(self) -> None:
        """Unmap. In the process that created the arena, free the memory: it must close last."""
        for part in self.parts:
            (part.driver.free if self._owned else part.driver.close)(part.array.address)
        os.close(self.fd)


Place = tuple[CudaDriver, int]
"""A device, and the bytes of the arena on it."""


def create_cuda_arena(places: Sequence[Place]) -> CudaArena:
    """Reserve device memory for a host's KV cache, rank by rank. Raises ArenaError if a device has not enough."""
    parts: list[CudaPart] = []
    try:
        for driver, size_bytes in places:
            part = _allocated(driver, size_bytes)
            parts.append(part)
        handles = [part.driver.export(part.array.address) for part in parts]
    except ArenaError:
        for part in parts:
            part.driver.free(part.array.address)
        raise
    fd = os.memfd_create("baton-cuda-handle", os.MFD_CLOEXEC)
    os.write(fd, b"".join(handles))
    return CudaArena(fd, sum(size for _, size in places), tuple(parts), True)


def _allocated(driver: CudaDriver, size_bytes: int) -> CudaPart:
    try:
        return CudaPart(driver, DeviceArray(driver.allocate(size_bytes), size_bytes, driver.device))
    except ArenaError as error:
        raise ArenaError(
            f"the GPU refuses {size_bytes / 2**30:.2f} GiB for the KV cache, of {driver.free_bytes() / 2**30:.2f} GiB"
            f" that are free: {error}; set kv.bytes or --kv-blocks to less"
        ) from error


def open_cuda_arena(places: Sequence[Place], fd: int, first_rank: int = 0) -> CudaArena:
    """Map the parts of some ranks of an arena. Takes over the descriptor `fd`. Raises ArenaError if it is invalid."""
    held = os.fstat(fd).st_size
    if held % HANDLE_BYTES or held < (first_rank + len(places)) * HANDLE_BYTES:
        raise ArenaError(
            f"the arena's descriptor holds {held} bytes, {first_rank + len(places)} ranks have a CUDA handle of"
            f" {HANDLE_BYTES} each; restart the server"
        )
    parts: list[CudaPart] = []
    for rank, (driver, size_bytes) in enumerate(places, first_rank):
        handle = os.pread(fd, HANDLE_BYTES, rank * HANDLE_BYTES)
        parts.append(CudaPart(driver, DeviceArray(driver.open(handle), size_bytes, driver.device)))
    return CudaArena(fd, sum(size for _, size in places), tuple(parts), False)
