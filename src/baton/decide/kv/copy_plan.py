"""A plan of copies as plain data: what is read of a source, where it lands, and how it is put into the target.

Offsets count from the start of the arena, or of the staging buffer. `kv/conversion.py` makes plans, and
`transfer/convert.py` executes them.
"""

from __future__ import annotations

from msgspec import Struct

from baton.decide.kv.layout import KVDtype


class Read(Struct, frozen=True, array_like=True):
    """A run of bytes of the source's arena. No byte of a block that the plan does not name is in it."""

    offset_bytes: int
    size_bytes: int


class Landing(Struct, frozen=True, array_like=True):
    """Where the next bytes of what is read belong: in the staging buffer, or in the target's arena for good."""

    offset_bytes: int
    size_bytes: int
    source_bytes: int
    """Where they are in the source's arena."""
    staged: bool


class Loop(Struct, frozen=True, array_like=True):
    """One dimension of a copy: how many, and how far apart in each of the three memories."""

    count: int
    source_bytes: int
    staged_bytes: int
    target_bytes: int


class StridedCopy(Struct, frozen=True, array_like=True):
    """Runs of cells, in nested loops. A cell is one head of one token in one plane of one layer, scale included."""

    source_bytes: int
    """Offset of the first cell in the source's arena."""
    staged_bytes: int
    """Offset of the same in the staging buffer: copies read from one or from the other."""
    target_bytes: int
    cells: int
    """Cells of a run, without a gap in any of the three memories."""
    loops: tuple[Loop, ...]
    """Outermost first."""


class CopyPlan(Struct, frozen=True, kw_only=True):
    """Everything that has to be done to bring some tokens' KV from one arena into another.

    `reads` one after the other are as many bytes as `landings` are, in the same order, but cut differently. When they
    have landed, `copies` bring what was staged into the target. Whoever sees the source's memory needs no staging: it
    does what `landings` and `copies` say from there.
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
