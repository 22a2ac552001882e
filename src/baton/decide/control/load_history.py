"""Load history of a cluster over days: recent windows at full resolution, older ones merged to a minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from baton.core.types import LoadWindow

FINE_WINDOWS_MAX = 4096
"""Number of recent windows at full resolution: a little over an hour at one per second."""
COARSE_S = 60.0
"""Older windows are merged up to this length. A single longer window stays as it is."""
COARSE_WINDOWS_MAX = 8 * 24 * 60
"""Maximum number of merged windows: a week and a day. Older ones are dropped (INV-9)."""


@dataclass(slots=True)
class LoadHistory(Sequence[LoadWindow]):
    """Windows, the oldest first. Each request is counted in one window only, so sums over windows are exact."""

    _coarse: deque[LoadWindow] = field(default_factory=lambda: deque[LoadWindow](maxlen=COARSE_WINDOWS_MAX))
    _fine: deque[LoadWindow] = field(default_factory=deque[LoadWindow])

    def append(self, window: LoadWindow) -> None:
        """Add the window that has just ended."""
        self._fine.append(window)
        if len(self._fine) > FINE_WINDOWS_MAX:
            self._thin_out(self._fine.popleft())

    def _thin_out(self, window: LoadWindow) -> None:
        coarse = self._coarse
        if coarse and coarse[-1].window_s + window.window_s <= COARSE_S:
            coarse[-1] = joined(coarse[-1], window)
        else:
            coarse.append(window)

    def __len__(self) -> int:
        return len(self._coarse) + len(self._fine)

    def __iter__(self) -> Iterator[LoadWindow]:
        return chain(self._coarse, self._fine)

    def __reversed__(self) -> Iterator[LoadWindow]:
        return chain(reversed(self._fine), reversed(self._coarse))

    @overload
    def __getitem__(self, index: int) -> LoadWindow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LoadWindow]: ...
    def __getitem__(self, index: int | slice) -> LoadWindow | Sequence[LoadWindow]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        coarse = len(self._coarse)
        return self._coarse[place] if place < coarse else self._fine[place - coarse]


def joined(early: LoadWindow, late: LoadWindow) -> LoadWindow:
    """Merge a window and the next one. Latencies are means over the requests of both, SLOs the tightest."""
    return LoadWindow(
        end_s=late.end_s,
        window_s=early.window_s + late.window_s,
        arrived_requests=early.arrived_requests + late.arrived_requests,
        arrived_tokens=early.arrived_tokens + late.arrived_tokens,
        begun_requests=early.begun_requests + late.begun_requests,
        cached_tokens=early.cached_tokens + late.cached_tokens,
        rejected_requests=early.rejected_requests + late.rejected_requests,
        prefilled_requests=early.prefilled_requests + late.prefilled_requests,
        ttft_s=_mean(early.ttft_s, early.prefilled_requests, late.ttft_s, late.prefilled_requests),
        finished_requests=early.finished_requests + late.finished_requests,
        output_tokens=early.output_tokens + late.output_tokens,
        tpot_s=_mean(early.tpot_s, _timed_requests(early), late.tpot_s, _timed_requests(late)),
        slo_ttft_s=_tightest(early.slo_ttft_s, late.slo_ttft_s),
        slo_tpot_s=_tightest(early.slo_tpot_s, late.slo_tpot_s),
    )


def _timed_requests(window: LoadWindow) -> int:
    """Return the number of requests in a window's mean TPOT; 0 if all finished requests had one token."""
    return window.finished_requests if window.tpot_s else 0


def _mean(early: float, early_requests: int, late: float, late_requests: int) -> float:
    requests = early_requests + late_requests
    return (early * early_requests + late * late_requests) / requests if requests else 0.0


def _tightest(early_s: float, late_s: float) -> float:
    """Return the lower SLO; 0 means no SLO."""
    return min(early_s or late_s, late_s or early_s)
