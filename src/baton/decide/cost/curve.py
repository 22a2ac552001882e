"""A measured curve with linear interpolation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at increasing `positions`. Constant before the first; extrapolated linearly past the last."""

    positions: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, position: float) -> float:
        """Return the value at a position."""
        if position <= self.positions[0] or len(self.positions) == 1:
            return self.values[0]
        right = min(bisect_left(self.positions, position), len(self.positions) - 1)
        x0, x1 = self.positions[right - 1], self.positions[right]
        y0, y1 = self.values[right - 1], self.values[right]
        return y0 + (y1 - y0) * (position - x0) / (x1 - x0)


def rising_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return a curve that never falls: averages equal positions, and raises falling values to the previous one."""
    positions: dict[float, list[float]] = {}
    for position, value in points:
        positions.setdefault(position, []).append(value)
    ordered = sorted((position, sum(values) / len(values)) for position, values in positions.items())
    values = [ordered[0][1]]
    values += [0.0] * (len(ordered) - 1)
    for index, (_, (_, value)) in enumerate(pairwise(ordered), start=1):
        values[index] = max(values[index - 1], value)
    return Curve(tuple(position for position, _ in ordered), tuple(values))
