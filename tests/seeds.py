"""Seeds of campaigns: few that change from day to day, or many in a deep run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seeds:
    """The day whose seeds a run draws, and whether it is a deep run."""

    day: int
    deep: bool

    def draw(self, few: int, *, deep: int) -> range:
        """Return consecutive seeds: `few` of the day, no day having one of another, or the first `deep` of all."""
        return range(deep) if self.deep else range(self.day * few, (self.day + 1) * few)
