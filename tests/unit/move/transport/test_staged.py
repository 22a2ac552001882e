"""Device bytes pass through bounded staging buffers, two portions at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from baton.core.errors import TransferError
from baton.move.copies import Moves, copy_one_by_one
from baton.move.transport.copier import copy_portions
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.port import Extent
from baton.move.transport.staged import StagedMemory
from tests.transfers.host_device_memory import HostDeviceMemory, ThreadedBuffer
from tests.transfers.kits import random_extents
from tests.transfers.wires import Gate

SIZE_BYTES = 10_000
PORTION_BYTES = 1_000


class CountedMemory(HostDeviceMemory):
    """A device that remembers its buffers."""

    def __init__(self, memory: memoryview, copy: Callable[[Moves], None] = copy_one_by_one) -> None:
        super().__init__(memory, copy)
        self.buffers: list[ThreadedBuffer] = []

    def buffer(self, size_bytes: int) -> ThreadedBuffer:
        made = super().buffer(size_bytes)
        self.buffers.append(made)
        return made


class LateBuffer(ThreadedBuffer):
    """A buffer that copies in `wait` only, so that a forgotten wait moves wrong bytes."""

    def __init__(self, device_address: int, size_bytes: int) -> None:
        super().__init__(device_address, size_bytes, copy_one_by_one)
        self._queue: list[np.ndarray] = []

    def _begin(self, moves: np.ndarray) -> None:
        self._queue.append(moves.astype(np.uint64))

    def wait(self) -> None:
        while self._queue:
            copy_one_by_one(self._queue.pop(0))


class LateMemory(HostDeviceMemory):
    def buffer(self, size_bytes: int) -> LateBuffer:
        return LateBuffer(self._address, size_bytes)


def device_of(copy: Callable[[Moves], None] = copy_one_by_one) -> tuple[bytearray, CountedMemory]:
    memory = bytearray(random.Random(1).randbytes(SIZE_BYTES))
    return memory, CountedMemory(memoryview(memory), copy)


def spread_of(staged: StagedMemory | memoryview, *extents: Extent) -> Spread:
    return Spread(rows_of(extents or (Extent(0, SIZE_BYTES),)), {0: staged})


def read_all(spread: Spread, start: int, size_bytes: int) -> bytes:
    portions = spread.read(start, size_bytes, spread.portion_bytes(size_bytes))
    return b"".join(bytes(view) for views in portions for view in views)


@pytest.mark.parametrize("kind", [CountedMemory, LateMemory])
def test_any_run_is_read_and_written_as_it_is_of_host_memory(kind: type[HostDeviceMemory]) -> None:
    """Whenever the device copies."""
    rng = random.Random(2)
    for _ in range(60):
        total = rng.randrange(1, SIZE_BYTES)
        extents = random_extents(rng, SIZE_BYTES, total_bytes=total)
        memory = bytearray(rng.randbytes(SIZE_BYTES))
        staged = StagedMemory(kind(memoryview(memory)), portion_bytes=PORTION_BYTES, lanes=1)
        spread = spread_of(staged, *extents)
        start = rng.randrange(total)
        size = rng.randrange(1, total - start + 1)
        expected = b"".join(memory[e.offset_bytes : e.offset_bytes + e.size_bytes] for e in extents)
        assert read_all(spread, start, size) == expected[start : start + size]
        plain = bytearray(memory)
        fresh = memoryview(rng.randbytes(size))
        source = Spread(rows_of([Extent(0, size)]), {0: fresh})
        copy_portions(copy_one_by_one, source, _Shifted(spread, start), range(size))
        at = 0
        for view in spread_of(memoryview(plain), *extents).cut(start, size):
            view[:] = fresh[at : at + view.nbytes]
            at += view.nbytes
        assert memory == plain
        staged.close()


class _Shifted(Spread):
    """A spread without its first bytes."""

    def __init__(self, spread: Spread, start: int) -> None:
        self._inner, self._start = spread, start

    def portion_bytes(self, size_bytes: int) -> int:
        return self._inner.portion_bytes(size_bytes)

    def write(self, start: int, size_bytes: int, portion_bytes: int):
        return self._inner.write(self._start + start, size_bytes, portion_bytes)


def test_the_next_portion_is_under_way_while_one_is_read() -> None:
    begun = threading.Semaphore(0)

    def copy(moves: Moves) -> None:
        begun.release()
        copy_one_by_one(moves)

    memory, device = device_of(copy)
    reads = spread_of(StagedMemory(device, portion_bytes=PORTION_BYTES)).read(0, SIZE_BYTES, PORTION_BYTES)
    assert bytes(next(reads)[0]) == memory[:PORTION_BYTES]
    for _ in range(2):
        assert begun.acquire(timeout=60)
    reads.close()


def test_a_portion_is_on_its_way_in_while_the_next_one_is_filled() -> None:
    gate = Gate(0)

    def copy(moves: Moves) -> None:
        gate.pass_bytes(1)
        copy_one_by_one(moves)

    memory, device = device_of(copy)
    before = bytes(memory)
    writes = spread_of(StagedMemory(device, portion_bytes=PORTION_BYTES)).write(0, SIZE_BYTES, PORTION_BYTES)
    next(writes)[0][:] = b"a" * PORTION_BYTES
    next(writes)[0][:] = b"b" * PORTION_BYTES
    gate.wait_until_reached()
    assert memory == before
    gate.open()
    writes.close()
    assert memory == b"a" * PORTION_BYTES + before[PORTION_BYTES:]  # what was not asked on from is not taken


def test_leaving_early_waits_for_what_is_under_way() -> None:
    """No copy is left that would use a buffer of the next borrower."""
    busy = [0]
    gate = Gate(0)

    def copy(moves: Moves) -> None:
        busy[0] += 1
        gate.pass_bytes(1)
        copy_one_by_one(moves)
        busy[0] -= 1

    _, device = device_of(copy)
    writes = spread_of(StagedMemory(device, portion_bytes=PORTION_BYTES)).write(0, SIZE_BYTES, PORTION_BYTES)
    next(writes)
    next(writes)
    gate.wait_until_reached()
    opening = threading.Thread(target=gate.open)
    opening.start()
    writes.close()
    assert busy == [0]
    opening.join()


def test_host_memory_is_bounded_however_many_read_and_write() -> None:
    """And every transfer gets a lane in the end."""
    memory, device = device_of()
    staged = StagedMemory(device, portion_bytes=PORTION_BYTES, lanes=2)
    half = SIZE_BYTES // 2
    expected = bytes(memory[:half])
    failures: list[str] = []

    def work(index: int) -> None:
        if read_all(spread_of(staged), 0, half) != expected:
            failures.append(f"{index} read other bytes")
        source = Spread(rows_of([Extent(0, 100)]), {0: memoryview(bytes([index]) * 100)})
        copy_portions(copy_one_by_one, source, spread_of(staged, Extent(half + 100 * index, 100)), range(100))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert memory[half : half + 2400] == b"".join(bytes([index]) * 100 for index in range(24))
    assert len(device.buffers) <= 2 * 2 * 2
    staged.close()


def test_a_device_that_fails_is_an_error_and_no_lane_is_lost() -> None:
    broken = [True]

    def copy(moves: Moves) -> None:
        if broken[0]:
            raise OSError("an uncorrectable error")
        copy_one_by_one(moves)

    memory, device = device_of(copy)
    staged = StagedMemory(device, portion_bytes=PORTION_BYTES, lanes=1)
    spread, fresh = spread_of(staged), spread_of(memoryview(bytearray(SIZE_BYTES)))
    for _ in range(3):
        with pytest.raises(TransferError, match="uncorrectable"):
            read_all(spread, 0, SIZE_BYTES)
        with pytest.raises(TransferError, match="uncorrectable"):
            copy_portions(copy_one_by_one, fresh, spread, range(SIZE_BYTES))
    broken[0] = False
    assert read_all(spread, 0, SIZE_BYTES) == memory


def test_the_last_copy_into_a_device_may_fail_too() -> None:
    """Otherwise wrong bytes would be reported as written."""
    left = [SIZE_BYTES // PORTION_BYTES]

    def copy(moves: Moves) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError("an uncorrectable error")
        copy_one_by_one(moves)

    _, device = device_of(copy)
    fresh = spread_of(memoryview(bytearray(SIZE_BYTES)))
    with pytest.raises(TransferError, match="uncorrectable"):
        copy_portions(
            copy_one_by_one, fresh, spread_of(StagedMemory(device, portion_bytes=PORTION_BYTES)), range(SIZE_BYTES)
        )


def test_a_host_without_memory_is_an_error_and_the_next_one_may_have_some() -> None:
    class Poor(CountedMemory):
        refusals = 3

        def buffer(self, size_bytes: int) -> ThreadedBuffer:
            self.refusals -= 1
            if self.refusals % 2 == 0:
                raise TransferError("no memory")
            return super().buffer(size_bytes)

    memory = bytearray(SIZE_BYTES)
    staged = StagedMemory(Poor(memoryview(memory)), portion_bytes=PORTION_BYTES, lanes=1)
    with pytest.raises(TransferError, match="no memory"):
        read_all(spread_of(staged), 0, 10)
    with pytest.raises(TransferError, match="no memory"):
        read_all(spread_of(staged), 0, 10)


def test_a_closed_memory_is_refused_and_closing_twice_is_harmless() -> None:
    _, device = device_of()
    staged = StagedMemory(device, portion_bytes=PORTION_BYTES)
    read_all(spread_of(staged), 0, 10)
    staged.close()
    staged.close()
    with pytest.raises(TransferError, match="closed"):
        read_all(spread_of(staged), 0, 10)


def test_one_device_at_a_time() -> None:
    _, device = device_of()
    views = {0: StagedMemory(device), 1: StagedMemory(device), 2: memoryview(bytearray(10))}
    assert not Spread(np.array([[0, 5, 0], [0, 5, 2]]), views).is_direct
    assert Spread(np.array([[0, 5, 2]]), views).is_direct
    with pytest.raises(TransferError, match="2 devices"):
        Spread(np.array([[0, 5, 0], [0, 5, 1]]), views)
