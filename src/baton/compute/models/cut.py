"""A part of a tensor, as a reader of weights is asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows (dimension 0) or columns (dimension 1)."""

    dimension: Literal[0, 1]
    part: range

    @property
    def index(self) -> tuple[slice, ...]:
        """Return what to index a tensor with."""
        kept = slice(self.part.start, self.part.stop)
        return (kept,) if self.dimension == 0 else (slice(None), kept)
