"""Registered memories, and runs of bytes that lie spread over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from baton.core.errors import TransferError
from baton.transfer.port import Extent, Ticket


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
        for extent in extents:
            self._check(extent)
        return Spread(extents, dict(enumerate(self._views)))

    def target_of(self, ticket: Ticket, extents: Sequence[Extent], *, name: str) -> Spread:
        """As `spread`, for a pull over the transport `name`: room for just what the ticket offers, each byte once."""
        if ticket.transport != name:
            raise TransferError(f"a ticket of {ticket.transport} cannot be pulled over {name}; use that transport")
        size_bytes = sum(extent.size_bytes for extent in ticket.extents)
        spread = self.spread(extents)
        if spread.size_bytes != size_bytes:
            raise TransferError(
                f"the ticket offers {size_bytes} bytes, the target has room for {spread.size_bytes};"
                " pull into extents of the same size in all"
            )
        for before, after in pairwise(sorted(extents, key=lambda extent: (extent.region, extent.offset_bytes))):
            if before.region == after.region and before.offset_bytes + before.size_bytes > after.offset_bytes:
                raise TransferError(
                    f"target extents overlap at byte {after.offset_bytes} of region {after.region}:"
                    " two writers would mix; pull into extents that do not"
                )
        return spread

    def _check(self, extent: Extent) -> None:
        if not 0 <= extent.region < len(self._views):
            raise TransferError(f"there is no region {extent.region}, {len(self._views)} are registered; register it")
        held_bytes = self._views[extent.region].nbytes
        if extent.offset_bytes < 0 or extent.size_bytes <= 0 or extent.offset_bytes + extent.size_bytes > held_bytes:
            raise TransferError(
                f"{extent.size_bytes} bytes at {extent.offset_bytes} lie outside of region {extent.region},"
                f" which has {held_bytes}; give extents inside of it"
            )

    def close(self) -> None:
        """Let go of them."""
        for view in self._views:
            view.release()
        self._views.clear()


def collate(extents: Sequence[Extent]) -> list[Extent]:
    """Merge neighbours that follow each other in memory too: fewer, longer runs cost less to move."""
    merged: list[Extent] = []
    for extent in extents:
        last = merged[-1] if merged else None
        if last and last.region == extent.region and last.offset_bytes + last.size_bytes == extent.offset_bytes:
            merged[-1] = Extent(last.offset_bytes, last.size_bytes + extent.size_bytes, last.region)
        else:
            merged.append(extent)
    return merged


class Spread:
    """Bytes in a row that lie in several places. Any run of them can be cut out, as views and without a copy."""

    def __init__(self, extents: Sequence[Extent], views: Mapping[int, memoryview]) -> None:
        """Neighbours are collated. `views` are the regions; without them, only `runs` can be asked for."""
        self._extents = collate(extents)
        self._views = views
        self._starts = list(accumulate((extent.size_bytes for extent in self._extents), initial=0))
        self.size_bytes = self._starts.pop()

    def cut(self, start: int, size_bytes: int) -> list[memoryview]:
        """Views of `size_bytes` bytes from `start` on, in order."""
        return [
            self._views[run.region][run.offset_bytes : run.offset_bytes + run.size_bytes]
            for run in self.runs(start, size_bytes)
        ]

    def runs(self, start: int, left_bytes: int) -> Iterator[Extent]:
        """Where these bytes lie, in order."""
        index = bisect_right(self._starts, start) - 1
        while left_bytes > 0:
            extent = self._extents[index]
            skipped = start - self._starts[index]
            taken = min(left_bytes, extent.size_bytes - skipped)
            yield Extent(extent.offset_bytes + skipped, taken, extent.region)
            start, left_bytes, index = start + taken, left_bytes - taken, index + 1
