"""A host's arena in device memory: one allocation, which every worker of the host maps by CUDA IPC.

Its descriptor is a memfd too, as that of an arena in host memory: it holds the handle instead of the blocks. So
workers are told about both in the same way. The server allocates, because it outlives its workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from baton.arena.cuda_driver import HANDLE_BYTES, CudaDriver
from baton.core.errors import ArenaError


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device, as array libraries take them over without a copy."""

    address: int
    bytes_total: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Describe the bytes. Source: CUDA Array Interface, version 3 (Numba's documentation)."""
        return {"shape": (self.bytes_total,), "typestr": "|u1", "data": (self.address, False), "version": 3}


@dataclass(slots=True)
class CudaArena:
    """One mapping of the arena. See `Arena`, which lies in host memory."""

    fd: int
    bytes_total: int
    memory: DeviceMemory
    _driver: CudaDriver
    _owned: bool
    """This process allocated it."""

    def prefault(self, start: int) -> int:
        """See `Arena.prefault`. Device memory is reserved when it is allocated."""
        return self.bytes_total

    def close(self) -> None:
        """Unmap; the process that created the arena gives the memory back, so it closes last."""
        if self._owned:
            self._driver.free(self.memory.address)
        else:
            self._driver.close(self.memory.address)
        os.close(self.fd)


def create_cuda_arena(driver: CudaDriver, bytes_total: int) -> CudaArena:
    """Reserve device memory for a host's KV cache. Raises ArenaError where the device has less."""
    try:
        address = driver.allocate(bytes_total)
    except ArenaError as error:
        raise ArenaError(
            f"the GPU refuses {bytes_total / 2**30:.2f} GiB for the KV cache, of {driver.free_bytes() / 2**30:.2f} GiB"
            f" that are free: {error}; set kv.bytes or --kv-blocks to less"
        ) from error
    fd = os.memfd_create("baton-cuda-handle", os.MFD_CLOEXEC)
    os.write(fd, driver.export(address))
    return CudaArena(fd, bytes_total, DeviceMemory(address, bytes_total), driver, True)


def open_cuda_arena(driver: CudaDriver, fd: int, bytes_total: int) -> CudaArena:
    """Map an arena whose descriptor was received. Takes over the descriptor."""
    handle = os.pread(fd, HANDLE_BYTES + 1, 0)
    if len(handle) != HANDLE_BYTES:
        raise ArenaError(
            f"the arena's descriptor holds {len(handle)} bytes, a CUDA handle has {HANDLE_BYTES}; restart the server"
        )
    return CudaArena(fd, bytes_total, DeviceMemory(driver.open(handle), bytes_total), driver, False)
