"""Device memory for transports: its bytes pass through page-locked host memory of a bounded size, in portions.

Whoever moves bytes borrows a lane: two buffers, so that the device copies one portion while the wire has another.
Lanes for reading and for writing are apart, and a source answers only once it has its lane: so two hosts that pull from
each other never wait in a circle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from baton.core.errors import TransferError
from baton.move.transport.device import CopyBuffer, DeviceMemory

PORTION_BYTES = 1 << 20
"""A copy of so much to or from a GPU takes some times as long as its beginning."""
LANES = 8
"""Copies of each direction at a time: the connections of two sources. The others wait for a lane."""

Lane = tuple[CopyBuffer, CopyBuffer]


class StagedMemory:
    """Device memory, and at most `2 x lanes x 2 x portion_bytes` of host memory that its bytes pass through."""

    def __init__(self, device: DeviceMemory, *, portion_bytes: int = PORTION_BYTES, lanes: int = LANES) -> None:
        self.portion_bytes = portion_bytes
        self.nbytes = device.nbytes
        self.location = device.location
        self.reads = Lanes(device, portion_bytes, lanes)
        self.writes = Lanes(device, portion_bytes, lanes)

    def close(self) -> None:
        """Give the host memory back, once nobody uses it any more. Harmless when it is closed."""
        self.reads.close()
        self.writes.close()


class Lanes:
    """Pairs of buffers that are lent and come back. They are made as they are needed, and stay."""

    def __init__(self, device: DeviceMemory, portion_bytes: int, lanes_max: int) -> None:
        self._device = device
        self._portion_bytes = portion_bytes
        self._lanes_max = lanes_max
        self._changed = threading.Condition()
        self._idle: list[Lane] = []
        self._made = 0
        self._closed = False

    @contextmanager
    def lent(self) -> Iterator[Lane]:
        """Borrow a lane; waits for one. On leaving, returns when nothing copies over it any more.

        Raises TransferError where the host has no memory for it, or after `close`.
        """
        lane = self._take()
        try:
            yield lane
        finally:
            for buffer in lane:
                with suppress(TransferError):  # who did not wait for it has failed already
                    buffer.wait()
            with self._changed:
                self._idle.append(lane)
                self._changed.notify_all()

    def close(self) -> None:
        """See `StagedMemory.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._idle) == self._made)
            idle, self._idle, self._made = self._idle, [], 0
        for lane in idle:
            for buffer in lane:
                buffer.close()

    def _take(self) -> Lane:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._idle or self._made < self._lanes_max)
            if self._closed:
                raise TransferError("the device's memory was closed under the pull")
            if self._idle:
                return self._idle.pop()
            self._made += 1
        try:
            return self._make()
        except TransferError:
            with self._changed:
                self._made -= 1
                self._changed.notify_all()
            raise

    def _make(self) -> Lane:
        first = self._device.buffer(self._portion_bytes)
        try:
            return first, self._device.buffer(self._portion_bytes)
        except TransferError:
            first.close()
            raise
