"""Counts the load of a cluster between two ticks."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import Outcome
from baton.core.types import LoadWindow, Request


@dataclass(slots=True)
class _Sums:
    arrived_requests: int = 0
    arrived_tokens: int = 0
    rejected_requests: int = 0
    prefilled_requests: int = 0
    ttft_s: float = 0.0
    finished_requests: int = 0
    output_tokens: int = 0
    tpot_requests: int = 0
    tpot_s: float = 0.0
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


@dataclass(slots=True)
class LoadMeter:
    """Counters of the current window. The driver, which sees the tokens, feeds them; roles and scaling read them."""

    taken_s: float = 0.0
    """End of the last window."""
    _sums: _Sums = field(default_factory=_Sums)

    def arrived(self, request: Request) -> None:
        sums = self._sums
        sums.arrived_requests += 1
        sums.arrived_tokens += request.prompt_tokens
        if request.slo is not None:
            sums.slo_ttft_s = min(sums.slo_ttft_s or request.slo.ttft_s, request.slo.ttft_s)
            sums.slo_tpot_s = min(sums.slo_tpot_s or request.slo.tpot_s, request.slo.tpot_s)

    def prefilled(self, ttft_s: float) -> None:
        """Record a first token and its TTFT."""
        self._sums.prefilled_requests += 1
        self._sums.ttft_s += ttft_s

    def closed(self, outcome: Outcome, *, output_tokens: int, decode_s: float) -> None:
        """Record the end of a request, `decode_s` after its first token."""
        if outcome == "rejected":
            self._sums.rejected_requests += 1
        if outcome != "finished":
            return
        self._sums.finished_requests += 1
        self._sums.output_tokens += output_tokens
        if output_tokens > 1:
            self._sums.tpot_requests += 1
            self._sums.tpot_s += decode_s / (output_tokens - 1)

    def take(self, now_s: float) -> LoadWindow:
        """Close the window and return it."""
        sums, self._sums = self._sums, _Sums()
        start_s, self.taken_s = self.taken_s, now_s
        return LoadWindow(
            end_s=now_s,
            window_s=now_s - start_s,
            arrived_requests=sums.arrived_requests,
            arrived_tokens=sums.arrived_tokens,
            rejected_requests=sums.rejected_requests,
            prefilled_requests=sums.prefilled_requests,
            ttft_s=sums.ttft_s / max(1, sums.prefilled_requests),
            finished_requests=sums.finished_requests,
            output_tokens=sums.output_tokens,
            tpot_s=sums.tpot_s / max(1, sums.tpot_requests),
            slo_ttft_s=sums.slo_ttft_s,
            slo_tpot_s=sums.slo_tpot_s,
        )
