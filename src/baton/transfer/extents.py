"""Registered memories, and runs of bytes that lie spread over them.

Lists of extents are worked on as arrays: KV that is cut layer by layer has tens of thousands of runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from baton.core.errors import TransferError
from baton.machine.copies import Runs, address_of
from baton.transfer.port import Extent, Ticket

Rows = npt.NDArray[np.int64]
"""[extents, 3]: offset, size and region, as an `Extent` has them."""


class Memories:
    """The memories that a transport may read and write, by region number."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []

    def register(self, memory: memoryview) -> int:
        """See `Transport.register`."""
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
            view.release()
        self._views.clear()


class Spread:
    """Bytes in a row that lie in several places. Any run of them can be cut out, as views and without a copy."""

    def __init__(self, rows: Rows, views: Mapping[int, memoryview]) -> None:
        """Neighbours are collated. `views` are the regions. Raises TransferError where a row lies outside of them."""
        _check_inside(rows, views)
        self._rows = collated(rows)
        self._views = views
        self._located: Rows | None = None
        """With addresses for offsets: what pieces of a copy are cut from."""
        self.size_bytes = int(self._rows[:, 1].sum())

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
        """Views of `size_bytes` bytes from `start` on, in order."""
        return [
            self._views[region][offset : offset + size]
            for offset, size, region in cut_rows(self._rows, start, size_bytes).tolist()
        ]

    def addresses(self, start: int, size_bytes: int) -> Runs:
        """Where in this process these bytes lie, in order."""
        if self._located is None:
            self._located = located(self._rows, {region: address_of(view) for region, view in self._views.items()})
        return runs_of(cut_rows(self._located, start, size_bytes))


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


def _check_inside(rows: Rows, views: Mapping[int, memoryview]) -> None:
    inside = np.zeros(len(rows), np.bool_)
    for region, view in views.items():
        fits = (rows[:, 0] >= 0) & (rows[:, 1] > 0) & (rows[:, 1] <= view.nbytes)
        inside |= (rows[:, 2] == region) & fits & (rows[:, 0] <= view.nbytes - rows[:, 1])
    if inside.all():
        return
    offset, size, region = rows[int(np.argmin(inside))].tolist()
    if region not in views:
        raise TransferError(f"there is no region {region}, {len(views)} are registered; register it")
    raise TransferError(
        f"{size} bytes at {offset} lie outside of region {region},"
        f" which has {views[region].nbytes}; give extents inside of it"
    )
