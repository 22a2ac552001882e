"""A host's arena in device memory: one allocation for each rank of a worker, which all workers map by CUDA IPC.

Its descriptor is a memfd too, as that of an arena in host memory: it holds handles instead of the blocks, one after the
other. So workers are told about both in the same way. The server allocates, because it outlives its workers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.errors import ArenaError
from baton.move.arena.cuda_driver import HANDLE_BYTES, CudaDriver


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Bytes on a device, as array libraries take them over without a copy."""

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
    """An allocation on one device: all of an arena, or what one rank has of every block of it."""

    driver: CudaDriver
    array: DeviceArray


@dataclass(slots=True)
class CudaArena:
    """One mapping of the arena, or of those parts of it that this process computes on. See `Arena`."""

    fd: int
    bytes_total: int
    """Of the parts that are mapped."""
    parts: tuple[CudaPart, ...]
    """By rank."""
    _owned: bool
    """This process allocated it."""

    @property
    def memory(self) -> DeviceArray:
        """The bytes of the only part: of an arena on one device, or of a rank's own."""
        (part,) = self.parts
        return part.array

    def prefault(self, start: int) -> int:
        """See `Arena.prefault`. Device memory is reserved when it is allocated."""
        return self.bytes_total

    def close(self) -> None:
        """Unmap; the process that created the arena gives the memory back, so it closes last."""
        for part in self.parts:
            (part.driver.free if self._owned else part.driver.close)(part.array.address)
        os.close(self.fd)


Place = tuple[CudaDriver, int]
"""A device, and how many bytes of the arena are there."""


def create_cuda_arena(places: Sequence[Place]) -> CudaArena:
    """Reserve device memory for a host's KV cache, rank by rank. Raises ArenaError where a device has less."""
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
    """Map the parts of so many ranks of an arena whose descriptor was received. Takes over the descriptor."""
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
