"""Memory that bytes enter and leave by copies only, as a GPU's: the port, and an implementation in host memory.

That of NVIDIA's driver is `baton.move.arena.cuda_memory`.
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
    """Where bytes are for those who reach them without the CPU: a network card, through NIXL."""

    kind: Literal["DRAM", "VRAM"]
    """NIXL's names of memory of the host and of a GPU."""
    address: int
    device: int = 0
    """Number of the GPU."""


class CopyBuffer(Protocol):
    """Host memory that the device copies from and to by itself, in the order in which that was begun.

    One thread at a time uses it.
    """

    memory: memoryview
    """Its bytes. What a copy that has begun reads or writes is touched after `wait` only."""

    def copy_out(self, moves: DeviceMoves) -> None:
        """Begin to copy from the device into the buffer. Raises TransferError where the device refuses."""
        ...

    def copy_in(self, moves: DeviceMoves) -> None:
        """Begin to copy from the buffer to the device. Raises TransferError where the device refuses."""
        ...

    def wait(self) -> None:
        """Return when every copy that has begun is done. Raises TransferError where one of them failed."""
        ...

    def close(self) -> None:
        """Give the memory back. Nothing is under way."""
        ...


class DeviceMemory(Protocol):
    """An arena on a device, as those see it who bring its bytes elsewhere. Every method may be called by any thread."""

    nbytes: int
    """Its size."""
    location: Location | None
    """None: it lies in several places, and can be copied only."""

    def buffer(self, size_bytes: int) -> CopyBuffer:
        """Reserve host memory to copy over. Raises TransferError where the host has none."""
        ...


class HostDeviceMemory:
    """Implements `DeviceMemory` without a device: its bytes are host memory, which threads copy."""

    def __init__(self, memory: memoryview, copy: Copy | None = None) -> None:
        """`memory` has to stay mapped for as long as anybody copies."""
        self.nbytes = memory.nbytes
        self._address = address_of(memory)
        self.location: Location | None = Location("DRAM", self._address)
        self._copy = copy or fastest_copy()

    def buffer(self, size_bytes: int) -> ThreadedBuffer:
        """See `DeviceMemory.buffer`."""
        return ThreadedBuffer(self._address, size_bytes, self._copy)


class ThreadedBuffer:
    """Implements `CopyBuffer`: each copy is done by a thread of its own, after the one before."""

    def __init__(self, device_address: int, size_bytes: int, copy: Copy) -> None:
        self.memory = memoryview(bytearray(size_bytes))
        self._device_address = device_address
        self._copy = copy
        self._last: threading.Thread | None = None
        self._failure = ""

    def copy_out(self, moves: DeviceMoves) -> None:
        """See `CopyBuffer.copy_out`."""
        self._begin(np.add(moves, (self._device_address, address_of(self.memory), 0)))

    def copy_in(self, moves: DeviceMoves) -> None:
        """See `CopyBuffer.copy_in`."""
        located = np.add(moves, (self._device_address, address_of(self.memory), 0))
        self._begin(located[:, (1, 0, 2)])

    def wait(self) -> None:
        """See `CopyBuffer.wait`."""
        if self._last is not None:
            self._last.join()
            self._last = None
        failure, self._failure = self._failure, ""
        if failure:
            raise TransferError(failure)

    def close(self) -> None:
        """See `CopyBuffer.close`."""
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
