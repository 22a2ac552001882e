"""A measured curve with linear interpolation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at increasing x positions (`places`). Constant before the first; extrapolated linearly past the last."""

    places: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, place: float) -> float:
        """Return the value at a place."""
        if place <= self.places[0] or len(self.places) == 1:
            return self.values[0]
        right = min(bisect_left(self.places, place), len(self.places) - 1)
        x0, x1 = self.places[right - 1], self.places[right]
        y0, y1 = self.values[right - 1], self.values[right]
        return y0 + (y1 - y0) * (place - x0) / (x1 - x0)


def rising_curve(points: Iterable[tuple[float, float]]) -> Curve:
    """Return a curve that never falls: averages points at one place, and raises falling values to the previous one."""
    places: dict[float, list[float]] = {}
    for place, value in points:
        places.setdefault(place, []).append(value)
    ordered = sorted((place, sum(values) / len(values)) for place, values in places.items())
    values = [ordered[0][1]]
    values += [0.0] * (len(ordered) - 1)
    for index, (_, (_, value)) in enumerate(pairwise(ordered), start=1):
        values[index] = max(values[index - 1], value)
    return Curve(tuple(place for place, _ in ordered), tuple(values))
