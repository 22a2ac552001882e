"""Device memory in host memory, whose copies run in threads."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.move.copies import Copy, address_of, fastest_copy
from baton.move.transport.device_memory import DeviceMoves, Location


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
