"""Memory that is accessible by copies only, such as a GPU's: the port, and an implementation in host memory.

The implementation for NVIDIA GPUs is `baton.move.arena.cuda_memory`.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.core.errors import TransferError
from baton.move.copies import Copy, address_of, fastest_copy

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


class HostDeviceMemory:
    """Implements `DeviceMemory` for tests: the device is host memory, and threads make the copies."""

    def __init__(self, memory: memoryview, copy: Copy | None = None) -> None:
        """`memory` must stay mapped as long as there are copies."""
        self.nbytes = memory.nbytes
        self._address = address_of(memory)
        self.location: Location | None = Location("DRAM", self._address)
        self._copy = copy or fastest_copy()

    def buffer(self, size_bytes: int) -> ThreadedBuffer:
        return ThreadedBuffer(self._address, size_bytes, self._copy)


class ThreadedBuffer:
    """Implements `CopyBuffer`: each copy runs in a thread of its own, after the previous one."""

    def __init__(self, device_address: int, size_bytes: int, copy: Copy) -> None:
        self.memory = memoryview(bytearray(size_bytes))
        self._device_address = device_address
        self._copy = copy
        self._last: threading.Thread | None = None
        self._failure = ""

    def copy_out(self, moves: DeviceMoves) -> None:
        self._begin(np.add(moves, (self._device_address, address_of(self.memory), 0)))

    def copy_in(self, moves: DeviceMoves) -> None:
        located = np.add(moves, (self._device_address, address_of(self.memory), 0))
        self._begin(located[:, (1, 0, 2)])

    def wait(self) -> None:
        if self._last is not None:
            self._last.join()
            self._last = None
        failure, self._failure = self._failure, ""
        if failure:
            raise TransferError(failure)

    def close(self) -> None:
        self.wait()

    def _begin(self, moves: DeviceMoves) -> None:
        before = self._last
        self._last = threading.Thread(target=self._run, args=(moves.astype(np.uint64), before), name="baton-device")
        self._last.start()

    def _run(self, moves: npt.NDArray[np.uint64], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._copy(moves)
        except OSError as error:
            self._failure = f"the device does not copy: {error}"
