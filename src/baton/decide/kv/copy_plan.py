"""A plan of copies as plain data: reads from the source, landings, and copies into the target.

Offsets count from the start of the arena or of the staging buffer. `decide/kv/conversion.py` makes plans;
`move/transport/convert.py` executes them.
"""

from __future__ import annotations

from msgspec import Struct

from baton.decide.kv.layout import KVDtype


class Read(Struct, frozen=True, array_like=True):
    """A run of bytes of the source's arena. It contains only bytes of blocks in the plan."""

    offset_bytes: int
    size_bytes: int


class Landing(Struct, frozen=True, array_like=True):
    """Destination of the next bytes that are read: the staging buffer, or their final place in the target's arena."""

    offset_bytes: int
    size_bytes: int
    source_bytes: int
    """Offset in the source's arena."""
    staged: bool


class Loop(Struct, frozen=True, array_like=True):
    """One dimension of a copy: the number of elements, and their distance in source, staging buffer and target."""

    count: int
    source_bytes: int
    staged_bytes: int
    target_bytes: int


class StridedCopy(Struct, frozen=True, array_like=True):
    """Runs of cells, in nested loops. A cell is one head of one token in one plane of one layer, scale included."""

    source_bytes: int
    """Offset of the first cell in the source's arena."""
    staged_bytes: int
    """Offset of the same cell in the staging buffer. A copy reads from the arena or from the buffer."""
    target_bytes: int
    cells: int
    """Cells of a run, contiguous in source, staging buffer and target."""
    loops: tuple[Loop, ...]
    """Outermost first."""


class CopyPlan(Struct, frozen=True, kw_only=True):
    """All reads and copies that bring the KV of some tokens from one arena into another.

    `reads` and `landings` are the same bytes in the same order, cut differently. After the landings, `copies` move
    staged bytes into the target. A process that maps the source's memory needs no staging: it runs `landings` and
    `copies` directly from there.
    """

    reads: tuple[Read, ...]
    landings: tuple[Landing, ...]
    copies: tuple[StridedCopy, ...]
    staging_bytes: int
    head_dim: int
    source_dtype: KVDtype
    target_dtype: KVDtype

    @property
    def read_bytes(self) -> int:
        return sum(read.size_bytes for read in self.reads)
