"""What the ways of KV have been measured to take: from host to host, from a host into a tier, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from baton.core.ways import RoadView

Road = tuple[str, str]
"""From where to where: names of hosts, or of a tier, which begins with `tier:`."""
_NEWEST_RATIO = 0.25
"""Weight of the newest measurement."""
FORGET_S = 30.0
"""What was measured counts for 1/e of itself after so long. So a way that was slow once is tried again, though nothing
that goes there could show that it is well by now."""


def tier_road(tier: str) -> str:
    """Name a tier as an end of a road. No host's name has a colon."""
    return f"tier:{tier}"


@dataclass(slots=True)
class _Known:
    ratio: float = 1.0
    """Measured time to predicted time."""
    measured: int = 0
    measured_s: float = 0.0
    """When it was measured last."""
    failed_s: float | None = None
    """When something last failed, with no success since."""
    tokens: int = 0
    """Under way."""

    def ratio_at(self, now_s: float) -> float:
        """How far the prediction is off, as far as that is remembered."""
        return 1.0 + (self.ratio - 1.0) * math.exp(-(now_s - self.measured_s) / FORGET_S)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    road: Road
    tokens: int
    predicted_s: float
    began_s: float


@dataclass(slots=True)
class Roads:
    """One entry per pair of hosts, and per host and tier, that anything has gone between; one per copy under way."""

    _known: dict[Road, _Known] = field(default_factory=dict[Road, _Known])
    _under_way: dict[Hashable, _UnderWay] = field(default_factory=dict[Hashable, _UnderWay])

    def begin(self, key: Hashable, road: Road, tokens: int, alone_s: Callable[[int], float], now_s: float) -> None:
        """Something begins its way. `key` tells it from all else; `alone_s`: see `view`."""
        known = self._known.setdefault(road, _Known())
        self._under_way[key] = _UnderWay(road, tokens, alone_s(known.tokens + tokens), now_s)
        known.tokens += tokens

    def end(self, key: Hashable, *, landed: bool, now_s: float) -> None:
        """It is over. What was not begun, or went over a road that is forgotten, changes nothing."""
        begun = self._under_way.pop(key, None)
        known = self._known.get(begun.road) if begun is not None else None
        if begun is None or known is None:
            return
        known.tokens -= begun.tokens
        if not landed:
            known.failed_s = now_s
            return
        known.failed_s = None
        if begun.predicted_s > 0.0:
            ratio = (now_s - begun.began_s) / begun.predicted_s
            before = known.ratio_at(now_s)
            known.ratio = before + (ratio - before) * (_NEWEST_RATIO if known.measured else 1.0)
            known.measured += 1
            known.measured_s = now_s

    def view(self, road: Road, tokens: int, alone_s: Callable[[int], float], now_s: float) -> RoadView:
        """Predict how long so many tokens take from now on.

        `alone_s` predicts it of a road with nothing under way, unmeasured; what was measured corrects it.
        """
        known = self._known.get(road) or _Known()
        return RoadView(
            expected_s=alone_s(known.tokens + tokens) * known.ratio_at(now_s) if tokens else 0.0,
            is_measured=known.measured > 0,
            failed_ago_s=math.inf if known.failed_s is None else now_s - known.failed_s,
        )

    def lose_host(self, host: str) -> None:
        """Forget what was measured from and to a host that is gone: it may come back as another one."""
        self._known = {road: known for road, known in self._known.items() if host not in road}
        self._under_way = {key: begun for key, begun in self._under_way.items() if host not in begun.road}
