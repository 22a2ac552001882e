"""Turns what happens to live requests into the catalog's metrics."""

from __future__ import annotations

from baton.core.messages import CloseRequest, StepReport
from baton.core.types import Role
from baton.metrics import catalog
from baton.metrics.registry import Metrics
from baton.server.live_request import LiveRequest
from baton.server.port import Timings


class Recorder:
    """Records at the moments when a figure becomes final."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def step(self, report: StepReport, role: Role) -> None:
        if report.step_s:
            self._metrics.observe(catalog.STEP, report.step_s, role)

    def started(self, live: LiveRequest) -> None:
        """The request's first slice is in a step."""
        self._metrics.count(catalog.PREFIX_QUERY_TOKENS, amount=live.request.prompt_tokens)
        self._metrics.count(catalog.PREFIX_HIT_TOKENS, amount=live.stamps.cached_tokens)

    def preempted(self) -> None:
        self._metrics.count(catalog.PREEMPTIONS)

    def failed_over(self) -> None:
        self._metrics.count(catalog.FAILOVERS)

    def role_flipped(self) -> None:
        self._metrics.count(catalog.ROLE_FLIPS)

    def sent(self, live: LiveRequest, tokens: int, now_s: float) -> None:
        """Text of `tokens` more tokens is on the client's socket. Call before the request's stamps are moved."""
        last_s = live.stamps.last_sent_s
        if last_s is None:
            self._metrics.observe(catalog.TTFT, max(0.0, now_s - live.stamps.arrived_s))
            return
        for _ in range(tokens):
            self._metrics.observe(catalog.ITL, max(0.0, now_s - last_s) / tokens)

    def closed(self, live: LiveRequest, close: CloseRequest, now_s: float) -> None:
        """The request is over."""
        outcome = "finished" if live.stopped and close.outcome == "cancelled" else close.outcome
        self._metrics.count(catalog.REQUESTS, outcome)
        if close.reject is not None:
            self._metrics.count(catalog.REJECTED, close.reject)
        if outcome != "finished":
            return
        timings = live.timings()
        for metric, value_s in (
            (catalog.QUEUE, timings.queue_s),
            (catalog.PREFILL, timings.prefill_s),
            (catalog.HANDOFF, timings.handoff_s),
        ):
            if value_s is not None:
                self._metrics.observe(metric, value_s)
        self._metrics.observe(catalog.E2E, max(0.0, now_s - live.stamps.arrived_s))
        tpot_s = self._tpot_s(live, now_s)
        if tpot_s is not None:
            self._metrics.observe(catalog.TPOT, tpot_s)
        if self._in_slo(live, timings, tpot_s, now_s):
            self._metrics.count(catalog.IN_SLO)

    @staticmethod
    def _tpot_s(live: LiveRequest, now_s: float) -> float | None:
        """First token on the socket to now, when the last one leaves for it."""
        first_s, gaps = live.stamps.first_sent_s, live.output_tokens - 1
        return max(0.0, now_s - first_s) / gaps if first_s is not None and gaps > 0 else None

    @staticmethod
    def _in_slo(live: LiveRequest, timings: Timings, tpot_s: float | None, now_s: float) -> bool:
        slo = live.request.slo
        if slo is None:
            return False
        ttft_s = timings.ttft_s if timings.ttft_s is not None else now_s - live.stamps.arrived_s
        return ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
