"""The port of memory that is accessible by copies only, such as a GPU's.

The implementation for NVIDIA GPUs is `baton.move.arena.cuda_memory`.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

DeviceMoves = npt.NDArray[np.int64]
"""[moves, 3]: offset in the device's memory, offset in the buffer, size in bytes. They do not overlap."""


class Location(Struct, frozen=True, array_like=True):
    """Physical location of memory, for a network card that reads it through NIXL without the CPU."""

    kind: Literal["DRAM", "VRAM"]
    """NIXL's names for host memory and GPU memory."""
    address: int
    device: int = 0
    """Number of the GPU."""


class CopyBuffer(Protocol):
    """Host memory that the device copies from and to asynchronously, in order. One thread at a time uses it."""

    memory: memoryview
    """Bytes of the buffer. Do not use bytes of a copy under way before `wait`."""

    def copy_out(self, moves: DeviceMoves) -> None:
        """Begin to copy from the device into the buffer. Raises TransferError if the device fails."""
        ...

    def copy_in(self, moves: DeviceMoves) -> None:
        """Begin to copy from the buffer to the device. Raises TransferError if the device fails."""
        ...

    def wait(self) -> None:
        """Wait until every copy is complete. Raises TransferError if one of them has failed."""
        ...

    def close(self) -> None:
        """Free the memory. No copy may be under way."""
        ...


class DeviceMemory(Protocol):
    """An arena on a device, for transports and tiers. Any thread may call every method."""

    nbytes: int
    """Size of the memory."""
    location: Location | None
    """None: it is spread over several devices and accessible by copies only."""

    def buffer(self, size_bytes: int) -> CopyBuffer:
        """Reserve a copy buffer in host memory. Raises TransferError if the host has no memory for it."""
        ...
