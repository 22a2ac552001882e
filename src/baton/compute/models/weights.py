"""The port for weights: tensors by their Hugging Face name, read one at a time. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from baton.compute.models.quantized import QuantizedMatrix


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A range of rows (dimension 0) or of columns (dimension 1) of a tensor."""

    dimension: Literal[0, 1]
    part: range

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index that selects this part of an array."""
        kept = slice(self.part.start, self.part.stop)
        return (kept,) if self.dimension == 0 else (slice(None), kept)


class WeightReader(Protocol):
    """Reads the tensors of one model."""

    def read(self, name: str, part: TensorSlice | None = None) -> np.ndarray:
        """Return one tensor, or a part of it, in the type of the file (float32 if the file is quantized).

        bfloat16 is returned as 16-bit integers, see `baton.compute.models.bfloat16`. The array may be a read-only view
        of the file.
        """
        ...

    def read_quantized(self, name: str) -> QuantizedMatrix | None:
        """Return one matrix with the codes stored in the file, or None if the file stores floats or another format."""
        ...


def find_overlap(places: Iterable[tuple[str, int, int]]) -> tuple[str, str] | None:
    """Return the names of two tensors that share bytes, or None. `places`: name, offset and size in bytes."""
    used = sorted((place for place in places if place[2]), key=lambda place: place[1])
    for (name, offset, size), (following, start, _) in pairwise(used):
        if offset + size > start:
            return name, following
    return None
