"""Record the metrics of live requests and steps."""

from __future__ import annotations

from baton.core.messages import StepReport
from baton.core.types import Role
from baton.decide.metrics import catalog
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.metrics_registry import Metrics


class Recorder:
    """Records each metric at the moment when its value is final."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def step(self, report: StepReport, role: Role) -> None:
        if report.step_s:
            self._metrics.observe(catalog.STEP, report.step_s, role)
        if report.drafted_tokens:
            self._metrics.count(catalog.SPECULATION_DRAFTED_TOKENS, amount=report.drafted_tokens)
            self._metrics.count(catalog.SPECULATION_ACCEPTED_TOKENS, amount=report.accepted_tokens)

    def started(self, live: LiveRequest) -> None:
        """Record that the first step with a part of the prompt has run."""
        self._metrics.count(catalog.PREFIX_QUERY_TOKENS, amount=live.request.prompt_tokens)
        self._metrics.count(catalog.PREFIX_HIT_TOKENS, amount=live.stamps.cached_tokens)

    def preempted(self) -> None:
        self._metrics.count(catalog.PREEMPTIONS)

    def copied(self, moved_bytes: int, layer_bytes: int) -> None:
        """Record a completed transfer of KV from another host. `layer_bytes`: the bytes sent by layer."""
        self._metrics.count(catalog.HANDOFF_BYTES, amount=moved_bytes)
        self._metrics.count(catalog.HANDOFF_LAYER_BYTES, amount=layer_bytes)

    def failed_over(self) -> None:
        self._metrics.count(catalog.FAILOVERS)

    def moved(self) -> None:
        self._metrics.count(catalog.LIVE_MOVES)

    def role_flipped(self) -> None:
        self._metrics.count(catalog.ROLE_FLIPS)

    def sent(self, live: LiveRequest, tokens: int, now_s: float) -> None:
        """Record that the text of `tokens` more tokens reached the client's socket, for TTFT and ITL."""
        last_s = live.stamps.last_sent_s
        if last_s is None:
            ttft_s = max(0.0, now_s - live.stamps.arrived_s)
            self._metrics.observe(catalog.TTFT, ttft_s)
            self._compare("ttft", ttft_s, live.predicted.ttft_s)
            if live.request.service is not None:
                self._metrics.observe(catalog.CLASS_TTFT, ttft_s, live.request.service.name)
        else:
            for _ in range(tokens):
                self._metrics.observe(catalog.ITL, max(0.0, now_s - last_s) / tokens)
        live.stamps.sent(tokens, now_s)
        if live.is_taken and live.finish is not None and live.finish.outcome == "finished":
            self._delivered(live)

    def closed(self, live: LiveRequest, finish: Finish) -> None:
        """Record the outcome of a request."""
        if live.request.service is not None:
            self._metrics.count(catalog.CLASS_REQUESTS, live.request.service.name, finish.outcome)
        self._metrics.count(catalog.REQUESTS, finish.outcome)
        if finish.reject is not None:
            self._metrics.count(catalog.REJECTED, finish.reject)

    def refused(self, status: int, code: str | None) -> None:
        """Record a refused HTTP request or connection. Does nothing for a status that no limit has."""
        if str(status) in catalog.REFUSAL_STATUS.values:
            self._metrics.count(catalog.HTTP_REFUSALS, str(status), code or "other")

    def _compare(self, latency: str, actual_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._metrics.observe(catalog.PREDICTION_ERROR, actual_s / predicted_s, latency)

    def _delivered(self, live: LiveRequest) -> None:
        """Record the latencies of a finished request once its last text has been sent."""
        timings = live.timings()
        for metric, value_s in (
            (catalog.QUEUE, timings.queue_s),
            (catalog.PREFILL, timings.prefill_s),
            (catalog.HANDOFF, timings.handoff_s),
            (catalog.E2E, timings.e2e_s),
            (catalog.TPOT, timings.tpot_s),
        ):
            if value_s is not None:
                self._metrics.observe(metric, value_s)
        if timings.tpot_s is not None:
            self._compare("tpot", timings.tpot_s, live.predicted.tpot_s)
        slo = live.request.slo
        if slo is None or timings.ttft_s is None:
            return
        if timings.ttft_s <= slo.ttft_s and (timings.tpot_s is None or timings.tpot_s <= slo.tpot_s):
            self._metrics.count(catalog.IN_SLO)
