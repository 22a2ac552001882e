"""Registered memories, and runs of bytes that lie spread over them.

Lists of extents are worked on as arrays: KV that is cut layer by layer has tens of thousands of runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.move.copies import Runs, address_of
from baton.move.transport.device import CopyBuffer, DeviceMoves, Location
from baton.move.transport.port import Extent, Memory, Ticket
from baton.move.transport.staged import StagedMemory

Rows = npt.NDArray[np.int64]
"""[extents, 3]: offset, size and region, as an `Extent` has them."""


class Memories:
    """The memories that a transport may read and write, by region number."""

    def __init__(self) -> None:
        self._views: list[Memory] = []

    def register(self, memory: Memory) -> int:
        """See `Transport.register`."""
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
        """Find the bytes of these extents. Raises TransferError where one lies outside of its region."""
        if not extents:
            raise TransferError("0 extents hold nothing to transfer; give at least one")
        return Spread(rows_of(extents), dict(enumerate(self._views)))

    def target_of(self, ticket: Ticket, extents: Sequence[Extent], *, name: str) -> Spread:
        """As `spread`, for a pull over the transport `name`: room for just what the ticket offers, each byte once."""
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
        """Let go of them."""
        for view in self._views:
            if isinstance(view, memoryview):
                view.release()
        self._views.clear()


class Spread:
    """Bytes in a row that lie in several places. Any run of them can be cut out, as views and without a copy.

    Where some lie on a device there are no such views (`is_direct`): then they are read and written in portions.
    """

    def __init__(self, rows: Rows, views: Mapping[int, Memory]) -> None:
        """Neighbours are collated. `views` are the regions.

        Raises TransferError where a row lies outside of them, or rows lie in several devices' memories.
        """
        _check_inside(rows, views)
        self._rows = collated(rows)
        self._memories = views
        self._views = {region: view for region, view in views.items() if isinstance(view, memoryview)}
        self._staged = _only_device(self._rows, views)
        self._located: Rows | None = None
        """With addresses for offsets: what pieces of a copy are cut from."""
        self.size_bytes = int(self._rows[:, 1].sum())

    @property
    def is_direct(self) -> bool:
        """All of it is host memory."""
        return self._staged is None

    def check_apart(self) -> None:
        """Raise TransferError where two runs overlap."""
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
        """Views of `size_bytes` bytes from `start` on, in order. Of what `is_direct`."""
        return [
            self._views[region][offset : offset + size]
            for offset, size, region in cut_rows(self._rows, start, size_bytes).tolist()
        ]

    def addresses(self, start: int, size_bytes: int) -> Runs:
        """Where these bytes lie, in order: in this process, or on a device that has a location."""
        return runs_of(cut_rows(self._where(), start, size_bytes))

    def all_addresses(self) -> Runs:
        """Where all of it lies, in order. See `addresses`."""
        return runs_of(self._where())

    def _where(self) -> Rows:
        if self._located is None:
            used = set(np.unique(self._rows[:, 2]).tolist())
            self._located = located(
                self._rows, {region: location_of(self._memories[region]).address for region in used}
            )
        return self._located

    def portion_bytes(self, size_bytes: int) -> int:
        """How much of `size_bytes` bytes `read` and `write` give at a time: all, of what `is_direct`."""
        return size_bytes if self._staged is None else min(size_bytes, self._staged.portion_bytes)

    def read(self, start: int, size_bytes: int, portion_bytes: int) -> Generator[list[memoryview]]:
        """Yield these bytes in order, as views of at most `portion_bytes`, which are good until the next are asked for.

        A device copies out the next portion meanwhile. Close it where it is not read to its end: nothing is under way
        then. Raises TransferError where a device fails.
        """
        portions = _portions(start, size_bytes, portion_bytes)
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
        """Yield views of at most `portion_bytes`, in order, to be filled before the next are asked for.

        What was filled is in its place when this has come to its end. Close it where it does not: nothing writes then.
        Raises TransferError where a device fails.
        """
        portions = _portions(start, size_bytes, portion_bytes)
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
        """Say where these bytes are in a buffer that holds them in order: the device's, and those of the host."""
        rows = cut_rows(self._rows, start, size_bytes)
        ats = np.cumsum(rows[:, 1]) - rows[:, 1]
        on_host = np.isin(rows[:, 2], list(self._views))
        moves = np.column_stack((rows[:, 0], ats, rows[:, 1]))[~on_host]
        return moves, [
            (self._views[region][offset : offset + size], at)
            for (offset, size, region), at in zip(rows[on_host].tolist(), ats[on_host].tolist(), strict=True)
        ]


def location_of(memory: Memory) -> Location:
    """Say where a memory begins. Raises TransferError for one of a device that lies in several places."""
    if isinstance(memory, memoryview):
        return Location("DRAM", address_of(memory))
    if memory.location is None:
        raise TransferError("this device's memory lies in several places and can be copied only; use tcp")
    return memory.location


def rows_of(extents: Sequence[Extent]) -> Rows:
    """Raises TransferError where a number has more than 63 bits."""
    numbers = chain.from_iterable(map(msgspec.structs.astuple, extents))
    try:
        return np.fromiter(numbers, np.int64, 3 * len(extents)).reshape(-1, 3)
    except OverflowError:
        raise TransferError("an extent is larger than any memory; use the ticket as the source gave it") from None


def located(rows: Rows, bases: Mapping[int, int]) -> Rows:
    """These rows with addresses for offsets, in memories that begin at `bases`."""
    found = rows.copy()
    for region, base in bases.items():
        found[rows[:, 2] == region, 0] += base
    return found


def runs_of(rows: Rows) -> Runs:
    """What is left of rows that were located."""
    return rows[:, :2].astype(np.uint64)


def collated(rows: Rows) -> Rows:
    """Merge neighbours that follow each other in memory too: fewer, longer runs cost less to move."""
    apart = (rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1]) | (rows[1:, 2] != rows[:-1, 2])
    if apart.all():
        return rows
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    merged = rows[first]
    merged[:, 1] = np.add.reduceat(rows[:, 1], first)
    return merged


def cut_rows(rows: Rows, start: int, size_bytes: int) -> Rows:
    """The rows of `size_bytes` bytes from `start` on."""
    ends = np.cumsum(rows[:, 1])
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
    """Tell lists of extents apart: a ticket may have been mistaken on its way."""
    return zlib.crc32(msgspec.msgpack.encode(extents))


def _portions(start: int, size_bytes: int, portion_bytes: int) -> list[tuple[int, int]]:
    """Cut a run into (start, size)."""
    end = start + size_bytes
    return [(at, min(portion_bytes, end - at)) for at in range(start, end, portion_bytes)]


def _only_device(rows: Rows, views: Mapping[int, Memory]) -> StagedMemory | None:
    """Find the device's memory that some of the rows lie in."""
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
    inside &= (offsets >= 0) & (sizes > 0)  # so the difference above was none that overflows
    if inside.all():
        return
    offset, size, region = rows[int(np.argmin(inside))].tolist()
    if region not in views:
        raise TransferError(f"there is no region {region}, {len(views)} are registered; register it")
    raise TransferError(
        f"{size} bytes at {offset} lie outside of region {region},"
        f" which has {views[region].nbytes}; give extents inside of it"
    )
