"""Device memory for transports: its bytes pass in portions through page-locked host memory of bounded size.

A transfer borrows a lane of two buffers, so that the device copies one portion while the network has the other. There
are separate lanes for reading and writing, and a source answers only once it has a lane: so two hosts that pull from
each other cannot deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from baton.core.errors import TransferError
from baton.move.transport.device_memory import CopyBuffer, DeviceMemory

PORTION_BYTES = 1 << 20
"""Large enough that starting a copy costs little compared to the copy itself."""
LANES = 8
"""Bound of the concurrent transfers per direction, enough for the connections of two sources. Others wait."""

Lane = tuple[CopyBuffer, CopyBuffer]


class StagedMemory:
    """Device memory with at most `2 x lanes x 2 x portion_bytes` of staging buffers in host memory."""

    def __init__(self, device: DeviceMemory, *, portion_bytes: int = PORTION_BYTES, lanes: int = LANES) -> None:
        self.portion_bytes = portion_bytes
        self.nbytes = device.nbytes
        self.location = device.location
        self.reads = Lanes(device, portion_bytes, lanes)
        self.writes = Lanes(device, portion_bytes, lanes)

    def close(self) -> None:
        """Wait until no transfer uses the buffers, and free them. Harmless if it is closed already."""
        self.reads.close()
        self.writes.close()


class Lanes:
    """Pool of buffer pairs. They are created on demand and reused."""

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
        """Borrow a lane, and wait for one if necessary. On leaving, wait for the end of its copies.

        Raises TransferError if the host has no memory for it, or after `close`.
        """
        lane = self._take()
        try:
            yield lane
        finally:
            for buffer in lane:
                with suppress(TransferError):  # a borrower that has not waited for its copies has failed already
                    buffer.wait()
            with self._changed:
                self._idle.append(lane)
                self._changed.notify_all()

    def close(self) -> None:
        """Wait until all lanes are returned, and free them."""
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
                raise TransferError("the device's memory was closed during the pull")
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
