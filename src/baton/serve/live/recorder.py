"""Record the metrics of live requests and steps."""

from __future__ import annotations

import logging
from typing import Literal

from msgspec import to_builtins

from baton.core.messages import StepReport
from baton.core.types import HostId, Role
from baton.decide.metrics import catalog
from baton.move.clock import unix_s
from baton.serve.live.live_request import Finish, LiveRequest
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recent import HostCopies, Recent, ended_request

Event = Literal["preemptions", "failovers", "moves", "role_flips", "unlogged_decisions"]
log = logging.getLogger("baton.server")
TENANTS_MAX = 64
OTHER_TENANTS = "other"
_EVENTS: dict[Event, catalog.Counter] = {
    "preemptions": catalog.PREEMPTIONS,
    "failovers": catalog.FAILOVERS,
    "moves": catalog.LIVE_MOVES,
    "role_flips": catalog.ROLE_FLIPS,
    "unlogged_decisions": catalog.UNLOGGED_DECISIONS,
}


class Recorder:
    """Records each measurement once it is final, for /metrics and for the next sample of the history."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recent = Recent()
        self._tenants: set[str] = set()
        """Tenants with series of their own."""

    def take_recent(self) -> Recent:
        """Return what was recorded since the last call."""
        recent, self._recent = self._recent, Recent()
        return recent

    def step(self, report: StepReport, role: Role) -> None:
        if report.step_s:
            self._metrics.observe(catalog.STEP, report.step_s, role)
            self._recent.step(report)
        if report.drafted_tokens:
            self._metrics.count(catalog.SPECULATION_DRAFTED_TOKENS, amount=report.drafted_tokens)
            self._metrics.count(catalog.SPECULATION_ACCEPTED_TOKENS, amount=report.accepted_tokens)

    def started(self, live: LiveRequest, kind: str) -> None:
        """Record that the first step with a part of the prompt has run, on a worker of this kind."""
        self._metrics.count(catalog.PROMPTS, kind)
        self._metrics.count(catalog.PREFIX_QUERY_TOKENS, amount=live.request.prompt_tokens)
        self._metrics.count(catalog.PREFIX_HIT_TOKENS, amount=live.stamps.cached_tokens)
        self._count_tokens(live, "prompt", live.request.prompt_tokens)
        self._count_tokens(live, "cached", live.stamps.cached_tokens)
        self._recent.counts["prompt_tokens"] += live.request.prompt_tokens
        self._recent.counts["cached_tokens"] += live.stamps.cached_tokens

    def note(self, event: Event) -> None:
        self._metrics.count(_EVENTS[event])
        self._recent.counts[event] += 1

    def failed_over(self, live: LiveRequest, read_tokens: int) -> None:
        """Record how much KV a request has on its new worker. Its newest token had none before."""
        recomputed_tokens = max(0, len(live.tokens) - 1 - read_tokens)
        self._metrics.count(catalog.FAILOVER_TOKENS, "read", amount=read_tokens)
        self._metrics.count(catalog.FAILOVER_TOKENS, "recomputed", amount=recomputed_tokens)

    def copied(self, way: tuple[HostId, HostId], copy: HostCopies, *, is_by_layer: bool) -> None:
        """Record a completed copy of KV. `way`: source and target. `is_by_layer`: each layer was sent once computed."""
        self._metrics.count(catalog.HANDOFF_BYTES, amount=copy.bytes)
        self._metrics.count(catalog.HANDOFF_LAYER_BYTES, amount=copy.bytes if is_by_layer else 0)
        self._metrics.count(catalog.HANDOFF_COPY, "prefill", amount=copy.overlap_s)
        self._metrics.count(catalog.HANDOFF_COPY, "handoff", amount=max(0.0, copy.copy_s - copy.overlap_s))
        self._recent.copied(way, copy)

    def count(self, metric: catalog.Counter, *labels: str) -> None:
        """Increase a counter of /metrics by one."""
        self._metrics.count(metric, *labels)

    def sent(self, live: LiveRequest, tokens: int, now_s: float) -> None:
        """Record that the text of `tokens` more tokens reached the client's socket, for TTFT and ITL."""
        last_s = live.stamps.last_sent_s
        if last_s is None:
            ttft_s = max(0.0, now_s - live.stamps.arrived_s)
            self._metrics.observe(catalog.TTFT, ttft_s)
            self._recent.value("ttft", ttft_s)
            self._compare("ttft", ttft_s, live.predicted.ttft_s)
            if live.request.service is not None:
                self._metrics.observe(catalog.CLASS_TTFT, ttft_s, live.request.service.name)
        else:
            gap_s = max(0.0, now_s - last_s) / tokens
            for _ in range(tokens):
                self._metrics.observe(catalog.ITL, gap_s)
                self._recent.value("itl", gap_s)
        self._metrics.count(catalog.GENERATED_TOKENS, amount=tokens)
        self._count_tokens(live, "output", tokens)
        self._recent.tokens_sent(live, tokens)
        live.stamps.sent(tokens, now_s)
        if live.is_taken and live.finish is not None and live.finish.outcome == "finished":
            self._delivered(live)
            self._show(live, live.finish)

    def closed(self, live: LiveRequest, finish: Finish) -> None:
        if live.request.service is not None:
            self._metrics.count(catalog.CLASS_REQUESTS, live.request.service.name, finish.outcome)
        if live.request.tenant:
            self._metrics.count(catalog.TENANT_REQUESTS, self._tenant(live.request.tenant), finish.outcome)
        self._metrics.count(catalog.REQUESTS, finish.outcome)
        if finish.outcome == "finished" and finish.reason is not None:
            self._metrics.count(catalog.FINISH_REASONS, finish.reason)
        self._recent.closed(finish)
        if finish.outcome != "finished":
            self._show(live, finish)
        if finish.reject is not None:
            self._metrics.count(catalog.REJECTED, finish.reject)

    def refused(self, status: int, code: str | None) -> None:
        """Record a refused HTTP request or connection. Ignores statuses that the metric does not list."""
        if str(status) in catalog.REFUSAL_STATUS.values:
            self._metrics.count(catalog.HTTP_REFUSALS, str(status), code or "other")

    def _show(self, live: LiveRequest, finish: Finish) -> None:
        """Show an ended request on the dashboard and in JSON logs."""
        ended = ended_request(live, finish, unix_s())
        self._recent.show(ended)
        if log.isEnabledFor(logging.INFO):
            fields = to_builtins(ended)
            named = {"request_id": fields.pop("id"), "reason": fields.pop("message"), "class": fields.pop("service")}
            log.info("request ended", extra={"fields": {**named, **fields.pop("timings"), **fields}})

    def _count_tokens(self, live: LiveRequest, kind: str, amount: int) -> None:
        """Count tokens for the class and the tenant of a request."""
        service, tenant = live.request.service, live.request.tenant
        if service is not None:
            self._metrics.count(catalog.CLASS_TOKENS, service.name, kind, amount=amount)
        if tenant:
            self._metrics.count(catalog.TENANT_TOKENS, self._tenant(tenant), kind, amount=amount)

    def _tenant(self, name: str) -> str:
        """Return the label of a tenant."""
        if len(self._tenants) < TENANTS_MAX:
            self._tenants.add(name)
        return name if name in self._tenants else OTHER_TENANTS

    def _compare(self, latency: str, actual_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            self._metrics.observe(catalog.PREDICTION_ERROR, actual_s / predicted_s, latency)
            self._recent.value(f"{latency}_ratio", actual_s / predicted_s)

    def _delivered(self, live: LiveRequest) -> None:
        """Record the latencies of a finished request whose whole text has been sent."""
        timings = live.timings()
        for metric, name, value_s in (
            (catalog.QUEUE, "queue", timings.queue_s),
            (catalog.PREFILL, "prefill", timings.prefill_s),
            (catalog.HANDOFF, "handoff", timings.handoff_s),
            (catalog.DECODE_QUEUE, "decode_queue", live.stamps.decode_queue_s),
            (catalog.E2E, "e2e", timings.e2e_s),
            (catalog.TPOT, "tpot", timings.tpot_s),
        ):
            if value_s is not None:
                self._metrics.observe(metric, value_s)
                self._recent.value(name, value_s)
        self._recent.handed_off(timings)
        if timings.tpot_s is not None:
            self._compare("tpot", timings.tpot_s, live.predicted.tpot_s)
        slo = live.request.slo
        if slo is None or timings.ttft_s is None:
            return
        self._recent.counts["with_slo"] += 1
        if timings.ttft_s <= slo.ttft_s and (timings.tpot_s is None or timings.tpot_s <= slo.tpot_s):
            self._metrics.count(catalog.IN_SLO)
            self._recent.counts["in_slo"] += 1
