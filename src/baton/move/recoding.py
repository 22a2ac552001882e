"""Convert strided runs of cells from one KV format to another: in C++ if there is a compiler, else with numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.decide.kv.layout import KVDtype, cell_bytes
from baton.move.copies import copy_library
from baton.move.number_formats import decode, encode

CHUNK_NUMBERS = 1 << 15
"""Numbers that numpy converts at a time, so that their float32 values stay in a core's cache."""
_CODES: dict[KVDtype, int] = {
    "float32": 0,
    "bfloat16": 1,
    "int8": 6,
    "fp8": 7,
    "fp4": 8,
    "mxfp4": 9,
    "float16": 10,
}
"""`KVFormat` in `move/kv_formats.h`."""

Cells = npt.NDArray[np.uint8]
Stride = tuple[int, int, int]
"""One loop: the number of elements, and their distances in bytes in source and target."""
Place = tuple[memoryview, int]
"""A memory, and the offset of the first byte in it."""


@dataclass(frozen=True, slots=True)
class Recoding:
    """A conversion of cells of `head_dim` numbers from one type to another."""

    source: KVDtype
    target: KVDtype
    head_dim: int

    def run(self, source: Place, target: Place, cells: int, loops: Sequence[Stride] = ()) -> None:
        """Convert runs of `cells` adjacent cells, in nested loops, outermost first.

        The memories must contain all runs, and runs of the target do not overlap.
        """
        sizes = cell_bytes(self.source, self.head_dim), cell_bytes(self.target, self.head_dim)
        counts = [*(loop[0] for loop in loops), cells]
        ends = [(*(loop[1 + end] for loop in loops), size) for end, size in enumerate(sizes)]
        # numpy raises ValueError if an array does not lie inside its memory.
        from_cells = np.ndarray((*counts, sizes[0]), np.uint8, source[0], source[1], (*ends[0], 1))
        into_cells = np.ndarray((*counts, sizes[1]), np.uint8, target[0], target[1], (*ends[1], 1))
        library = copy_library()
        if library is None:
            for from_chunk, into_chunk in _chunks(from_cells, into_cells, self.head_dim):
                self._run_chunk(from_chunk, into_chunk)
            return
        geometry = np.array([len(loops), cells, *(number for loop in loops for number in loop)], np.int64)
        failed = library.baton_recode(
            ctypes.c_void_p(from_cells.ctypes.data),
            ctypes.c_void_p(into_cells.ctypes.data),
            *(ctypes.c_int32(number) for number in (_CODES[self.source], _CODES[self.target], self.head_dim)),
            ctypes.c_void_p(geometry.ctypes.data),
        )
        assert not failed, f"no head has {self.head_dim} numbers"

    def _run_chunk(self, source: Cells, target: Cells) -> None:
        numbers = np.empty((*source.shape[:-1], self.head_dim), np.float32)
        with np.errstate(all="ignore"):  # NaN and overflow are handled by `encode`, as the engines do
            decode(source, self.source, numbers)
            encode(numbers, self.target, target)


def _chunks(source: Cells, target: Cells, head_dim: int) -> Iterator[tuple[Cells, Cells]]:
    """Cut two arrays of cells in the same way along their outer dimensions, into pieces that fit into a cache."""
    inner_cells = int(np.prod(source.shape[1:-1]))
    step = CHUNK_NUMBERS // (inner_cells * head_dim)
    if step == 0 and source.ndim > 2:
        for one, other in zip(source, target, strict=True):
            yield from _chunks(one, other, head_dim)
        return
    for start in range(0, len(source), max(1, step)):
        yield source[start : start + max(1, step)], target[start : start + max(1, step)]
