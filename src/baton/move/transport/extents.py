"""Registered memories, and sequences of byte runs in them.

Extents are processed as arrays, because KV that is cut layer by layer has tens of thousands of runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.move.copies import MoveList, Moves, Runs, address_of, fastest_copy
from baton.move.transport.device_memory import CopyBuffer, DeviceMoves, Location
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.staged import StagedMemory

COLLATED_RUN_BYTES = 8 * 1024
"""Runs with a shorter mean are collated. The kernel takes 1 to 2 us per run, and a slab is filled at 7 GB/s: measured
over loopback, 3 KiB runs take two thirds of their CPU time in place, 12 KiB runs the same."""
SLAB_BYTES = 1024 * 1024
"""Size of the buffer for collated runs. It stays in a core's cache."""

Rows = npt.NDArray[np.int64]
"""[extents, 3]: offset, size and region of each `Extent`."""


class Memories:
    """The registered memories of a host, by region number."""

    def __init__(self) -> None:
        self._views: list[Memory] = []

    def register(self, memory: Memory) -> int:
        """Add a memory and return its region number. Raises TransferError if it is read-only or not contiguous."""
        if isinstance(memory, StagedMemory):
            self._views.append(memory)
            return len(self._views) - 1
        if memory.readonly or not memory.c_contiguous:
            raise TransferError(
                "cannot register memory that is read-only or has gaps; pass a writable, flat memoryview"
            )
        self._views.append(memory.cast("B"))
        return len(self._views) - 1

    def spread(self, extents: Sequence[Extent]) -> Spread:
        """Return the bytes of these extents. Raises TransferError if one lies outside of its region."""
        if not extents:
            raise TransferError("0 extents hold nothing to transfer; give at least one")
        return Spread(rows_of(extents), dict(enumerate(self._views)))

    def target_of(self, ticket: Ticket, extents: Sequence[Extent], *, name: str) -> Spread:
        """Return the target of a pull over the transport `name`.

        Raises TransferError unless the extents have the size of the ticket's offer and do not overlap.
        """
        if ticket.transport != name:
            raise TransferError(f"a ticket of {ticket.transport} cannot be pulled over {name}; use that transport")
        size_bytes = total_bytes(ticket.extents)
        spread = self.spread(extents)
        if spread.size_bytes != size_bytes:
            raise TransferError(
                f"the ticket offers {size_bytes} bytes, the target has room for {spread.size_bytes};"
                " pull into extents of the same size in all"
            )
        spread.check_apart()
        return spread

    def close(self) -> None:
        """Release the views of host memory."""
        for view in self._views:
            if isinstance(view, memoryview):
                view.release()
        self._views.clear()


class Spread:
    """A sequence of bytes that is spread over several memories.

    If all of them are host memory (`is_direct`), any range is available as views, without a copy. Otherwise ranges are
    read and written in portions. Many short runs of host memory (`is_collated`) are read and written through a slab, in
    one pass that gathers or scatters them, so that a transport has one long run per portion.
    """

    def __init__(self, rows: Rows, views: Mapping[int, Memory]) -> None:
        """`views` are the regions. Adjacent rows are merged.

        Raises TransferError if a row lies outside of its region, or if rows lie on more than one device.
        """
        _check_inside(rows, views)
        self._rows = collated(rows)
        self._memories = views
        self._views = {region: view for region, view in views.items() if isinstance(view, memoryview)}
        self._staged = _only_device(self._rows, views)
        self._located: Rows | None = None
        """Rows with addresses instead of offsets, computed on first use."""
        self._ends = np.cumsum(self._rows[:, 1])
        self.size_bytes = int(self._ends[-1])
        self.is_collated = self._staged is None and self.size_bytes < len(self._rows) * COLLATED_RUN_BYTES

    @property
    def is_direct(self) -> bool:
        """True if all bytes lie in host memory."""
        return self._staged is None

    def check_apart(self) -> None:
        """Raise TransferError if two runs overlap."""
        ordered = self._rows[np.lexsort((self._rows[:, 0], self._rows[:, 2]))]
        before, after = ordered[:-1], ordered[1:]
        mixed = (before[:, 2] == after[:, 2]) & (before[:, 0] + before[:, 1] > after[:, 0])
        if mixed.any():
            offset, _, region = after[int(np.argmax(mixed))].tolist()
            raise TransferError(
                f"target extents overlap at byte {offset} of region {region}:"
                " two writers would mix; pull into extents that do not"
            )

    def cut(self, start: int, size_bytes: int) -> list[memoryview]:
        """Return views of `size_bytes` bytes from `start` on, in order. Only for an `is_direct` spread."""
        return [
            self._views[region][offset : offset + size]
            for offset, size, region in cut_rows(self._rows, start, size_bytes, self._ends).tolist()
        ]

    def addresses(self, start: int, size_bytes: int) -> Runs:
        """Return the addresses of a range, in order: in this process, or on a device with a location."""
        return runs_of(cut_rows(self._where(), start, size_bytes, self._ends))

    def all_addresses(self) -> Runs:
        """Return the addresses of all bytes, in order."""
        return runs_of(self._where())

    def _where(self) -> Rows:
        if self._located is None:
            used = set(np.unique(self._rows[:, 2]).tolist())
            self._located = located(
                self._rows, {region: location_of(self._memories[region]).address for region in used}
            )
        return self._located

    def portion_bytes(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` bytes `read` and `write` handle at a time."""
        if self.is_collated:
            return min(size_bytes, SLAB_BYTES)
        return size_bytes if self._staged is None else min(size_bytes, self._staged.portion_bytes)

    def read(self, start: int, size_bytes: int, portion_bytes: int) -> Generator[list[memoryview]]:
        """Yield a range in order, as views of at most `portion_bytes` that are valid until the next iteration.

        A device copies the next portion meanwhile. Close the generator if it is not exhausted, so that no copy is left
        under way. Raises TransferError if a device fails.
        """
        portions = _portions(start, size_bytes, portion_bytes)
        if self.is_collated:
            slab, moves = _Slab(portion_bytes), self._slab_moves(start, size_bytes)
            for at, size in portions:
                slab.gather(moves, at - start, size)
                yield [slab.memory[:size]]
            return
        if self._staged is None:
            yield from (self.cut(*portion) for portion in portions)
            return
        with self._staged.reads.lent() as lane:
            self._begin_out(lane[0], *portions[0])
            for number, (_, size) in enumerate(portions):
                if number + 1 < len(portions):
                    self._begin_out(lane[(number + 1) % 2], *portions[number + 1])
                lane[number % 2].wait()
                yield [lane[number % 2].memory[:size]]

    def write(self, start: int, size_bytes: int, portion_bytes: int) -> Generator[list[memoryview]]:
        """Yield views of at most `portion_bytes`, in order. Fill them before the next iteration.

        The bytes are in their place when the generator is exhausted. Otherwise close it, so that no copy is left under
        way. Raises TransferError if a device fails.
        """
        portions = _portions(start, size_bytes, portion_bytes)
        if self.is_collated:
            slab, moves = _Slab(portion_bytes), self._slab_moves(start, size_bytes)
            for at, size in portions:
                yield [slab.memory[:size]]
                slab.scatter(moves, at - start, size)
            return
        if self._staged is None:
            yield from (self.cut(*portion) for portion in portions)
            return
        with self._staged.writes.lent() as lane:
            for number, portion in enumerate(portions):
                buffer = lane[number % 2]
                buffer.wait()
                yield [buffer.memory[: portion[1]]]
                self._begin_in(buffer, *portion)
            for buffer in lane:
                buffer.wait()

    def _slab_moves(self, start: int, size_bytes: int) -> MoveList:
        """Return the moves of a range to a slab at address 0 that would hold all of it."""
        runs = self.addresses(start, size_bytes)
        return MoveList(np.column_stack((runs[:, 0], np.cumsum(runs[:, 1]) - runs[:, 1], runs[:, 1])))

    def _begin_out(self, buffer: CopyBuffer, start: int, size_bytes: int) -> None:
        moves, on_host = self._placed(start, size_bytes)
        buffer.copy_out(moves)
        for view, at in on_host:
            buffer.memory[at : at + view.nbytes] = view

    def _begin_in(self, buffer: CopyBuffer, start: int, size_bytes: int) -> None:
        moves, on_host = self._placed(start, size_bytes)
        buffer.copy_in(moves)
        for view, at in on_host:
            view[:] = buffer.memory[at : at + view.nbytes]

    def _placed(self, start: int, size_bytes: int) -> tuple[DeviceMoves, list[tuple[memoryview, int]]]:
        """Return the parts of a range with offsets in a buffer that holds it in order: device moves and host views."""
        rows = cut_rows(self._rows, start, size_bytes, self._ends)
        ats = np.cumsum(rows[:, 1]) - rows[:, 1]
        on_host = np.isin(rows[:, 2], list(self._views))
        moves = np.column_stack((rows[:, 0], ats, rows[:, 1]))[~on_host]
        return moves, [
            (self._views[region][offset : offset + size], at)
            for (offset, size, region), at in zip(rows[on_host].tolist(), ats[on_host].tolist(), strict=True)
        ]


class _Slab:
    """A buffer through which short runs are read or written, each portion in one call."""

    def __init__(self, size_bytes: int) -> None:
        self.memory = memoryview(np.empty(size_bytes, np.uint8))
        self._address = np.uint64(address_of(self.memory))
        self._copy = fastest_copy()

    def gather(self, moves: MoveList, start: int, size_bytes: int) -> None:
        """Copy the runs of a portion into the slab."""
        self._copy(self._placed(moves, start, size_bytes))

    def scatter(self, moves: MoveList, start: int, size_bytes: int) -> None:
        """Copy the slab to the runs of a portion."""
        self._copy(self._placed(moves, start, size_bytes)[:, (1, 0, 2)])

    def _placed(self, moves: MoveList, start: int, size_bytes: int) -> Moves:
        placed = moves.cut(start, size_bytes)
        placed[:, 1] += self._address - np.uint64(start)
        return placed


def location_of(memory: Memory) -> Location:
    """Return the location at which a memory begins. Raises TransferError if it is spread over several devices."""
    if isinstance(memory, memoryview):
        return Location("DRAM", address_of(memory))
    if memory.location is None:
        raise TransferError("this memory is spread over several devices and accessible by copies only; use tcp")
    return memory.location


def rows_of(extents: Sequence[Extent]) -> Rows:
    """Return extents as an array. Raises TransferError if a number has more than 63 bits."""
    numbers = chain.from_iterable(map(msgspec.structs.astuple, extents))
    try:
        return np.fromiter(numbers, np.int64, 3 * len(extents)).reshape(-1, 3)
    except OverflowError:
        raise TransferError("an extent is larger than any memory; use the ticket as the source gave it") from None


def located(rows: Rows, bases: Mapping[int, int]) -> Rows:
    """Return rows with addresses instead of offsets, in memories that begin at `bases`."""
    found = rows.copy()
    for region, base in bases.items():
        found[rows[:, 2] == region, 0] += base
    return found


def runs_of(rows: Rows) -> Runs:
    """Return the addresses and sizes of located rows, without their regions."""
    return rows[:, :2].astype(np.uint64)


def collated(rows: Rows) -> Rows:
    """Merge rows that are adjacent in memory: fewer, longer runs cost less to copy."""
    apart = (rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1]) | (rows[1:, 2] != rows[:-1, 2])
    if apart.all():
        return rows
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    merged = rows[first]
    merged[:, 1] = np.add.reduceat(rows[:, 1], first)
    return merged


def cut_rows(rows: Rows, start: int, size_bytes: int, ends: npt.NDArray[np.int64] | None = None) -> Rows:
    """Return the rows of `size_bytes` bytes from `start` on. `ends`: the sums of sizes up to each row, if known."""
    ends = np.cumsum(rows[:, 1]) if ends is None else ends
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, start + size_bytes, side="left"))
    part = rows[first : last + 1].copy()
    skipped = start - int(ends[first] - rows[first, 1])
    part[-1, 1] -= int(ends[last]) - (start + size_bytes)
    part[0] += (skipped, -skipped, 0)
    return part


def total_bytes(extents: Sequence[Extent]) -> int:
    return sum(extent.size_bytes for extent in extents)


def digest(extents: Sequence[Extent]) -> int:
    """Return a digest by which a source recognizes its own extents in a ticket."""
    return zlib.crc32(msgspec.msgpack.encode(extents))


def _portions(start: int, size_bytes: int, portion_bytes: int) -> list[tuple[int, int]]:
    """Cut a range into portions: (start, size) of each."""
    end = start + size_bytes
    return [(at, min(portion_bytes, end - at)) for at in range(start, end, portion_bytes)]


def _only_device(rows: Rows, views: Mapping[int, Memory]) -> StagedMemory | None:
    """Return the device memory that some of the rows lie in, if any. Raises TransferError if there are several."""
    devices = {region: view for region, view in views.items() if isinstance(view, StagedMemory)}
    used = set(np.unique(rows[:, 2]).tolist()) if devices else set[int]()
    found = {id(view): view for region, view in devices.items() if region in used}
    if len(found) > 1:
        raise TransferError(f"these extents lie in {len(found)} devices' memories; transfer those of one at a time")
    return next(iter(found.values()), None)


def _check_inside(rows: Rows, views: Mapping[int, Memory]) -> None:
    offsets, sizes, regions = rows.T
    inside = np.zeros(len(rows), np.bool_)
    for region, view in views.items():
        inside |= (regions == region) & (offsets <= view.nbytes - sizes)
    inside &= (offsets >= 0) & (sizes > 0)  # rejects rows whose difference above has overflowed
    if inside.all():
        return
    offset, size, region = rows[int(np.argmin(inside))].tolist()
    if region not in views:
        raise TransferError(f"region {region} does not exist, {len(views)} are registered; register it")
    raise TransferError(
        f"{size} bytes at {offset} lie outside of region {region},"
        f" which has {views[region].nbytes}; give extents inside of it"
    )
