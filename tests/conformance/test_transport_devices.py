"""Failures of a device during pulls: errors, slowness, and a shortage of lanes. In addition to the suite.

The device is `HostDeviceMemory`, whose copies a test holds or fails.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from baton.core.errors import TransferError
from baton.move.copies import Copy, Moves
from baton.move.transport.port import Extent
from baton.move.transport.staged import StagedMemory
from tests.transfers.host_device_memory import HostDeviceMemory
from tests.transfers.kits import Kit, Side, kit_of, offered
from tests.transfers.wires import Gate

SIZE_BYTES = 1 << 20


class Device:
    """A device whose copies fail after a number of bytes, or wait at a gate."""

    def __init__(self, *, fails_after_bytes: int | None = None, gate: Gate | None = None) -> None:
        self.left_bytes = fails_after_bytes
        self.gate = gate
        self.busy = 0
        self._lock = threading.Lock()

    def copy(self, moves: Moves) -> None:
        with self._lock:
            self.busy += 1
        try:
            for source, target, size_bytes in moves.tolist():
                if self.gate is not None:
                    self.gate.pass_bytes(size_bytes)
                self._count(size_bytes)
                ctypes.memmove(target, source, size_bytes)
        finally:
            with self._lock:
                self.busy -= 1

    def _count(self, size_bytes: int) -> None:
        if self.left_bytes is None:
            return
        with self._lock:
            self.left_bytes -= size_bytes
            if self.left_bytes < 0:
                raise OSError("it has fallen off the bus")


def side_on(kit: Kit, copy: Copy, *, lanes: int = 2) -> Side:
    """A side whose arena is on that device."""
    side = kit.side()
    staged = StagedMemory(HostDeviceMemory(side.arena.memory, copy), portion_bytes=24_000, lanes=lanes)
    side.region = side.transport.register(staged)
    return side


@pytest.fixture(params=["memory staged", "tcp staged"])
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kit_of(request.param) as made:
        yield made


@pytest.mark.parametrize("where", ["source", "target"])
def test_a_device_that_fails_under_a_pull_fails_it(kit: Kit, where: str) -> None:
    """No write follows, and the next pull works over the same lanes once the device does."""
    broken, sound = Device(fails_after_bytes=300_000), Device()
    source = side_on(kit, (broken if where == "source" else sound).copy)
    target = side_on(kit, (broken if where == "target" else sound).copy)
    ticket, content = offered(source)
    for _ in range(3):
        with pytest.raises(TransferError, match=r"bus|broke 5 times"):
            target.transport.pull(ticket, target.whole()).wait(60)
        assert (broken if where == "target" else sound).busy == 0, "the target's device still copies"
        assert sound.busy == broken.busy == 0 or kit.name == "tcp", "over tcp a source may lag behind"
        assert target.content() != content
    broken.left_bytes = None
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content


def test_a_cancel_waits_for_the_device(kit: Kit) -> None:
    """A copy under way cannot be stopped; when the cancel returns, it has ended."""
    gate = Gate(200_000)
    slow = Device(gate=gate)
    source, target = kit.side(), side_on(kit, slow.copy)
    ticket, content = offered(source)
    pull = target.transport.pull(ticket, target.whole())
    gate.wait_until_reached()
    opening = threading.Thread(target=gate.open)
    opening.start()
    pull.cancel()
    assert slow.busy == 0
    opening.join()
    with pytest.raises(TransferError, match="cancelled"):
        pull.wait(0.0)
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content


def test_hosts_with_one_lane_that_pull_from_each_other_come_to_an_end(kit: Kit) -> None:
    """Neither side holds a lane that the other one waits for."""
    sides = [side_on(kit, Device().copy, lanes=1) for _ in range(3)]
    contents = [side.fill(seed) for seed, side in enumerate(sides)]
    step = SIZE_BYTES // 8
    pulls = []
    for index in range(3):
        for part in range(4):
            source, target = sides[index], sides[(index + 1) % 3]
            ticket = source.transport.offer([Extent(part * step, step, source.region)], lease_s=600.0)
            pulls.append(target.transport.pull(ticket, [Extent((4 + part) * step, step, target.region)]))
    for pull in pulls:
        assert pull.wait(60) == step
    for index in range(3):
        assert sides[(index + 1) % 3].content()[4 * step :] == contents[index][: 4 * step]


def test_memory_of_this_machine_is_copied_to_a_device() -> None:
    """Over shared memory, from an arena in host memory; one on a device cannot be mapped."""
    with kit_of("shm") as kit:
        source, target = kit.side(), side_on(kit, Device().copy)
        ticket, content = offered(source)
        target.transport.pull(ticket, target.whole()).wait(60)
        assert target.content() == content
        with pytest.raises(TransferError, match="offer over tcp"):
            target.transport.offer(target.whole(), lease_s=600.0)
