"""Collect what happened since the last sample of the history: latencies, tokens, handoffs, and ended requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.messages import StepReport
from baton.serve.live.live_request import Finish, LiveRequest, Timings

VALUES_MAX = 4096
"""Values kept of one latency in one sample. Later ones are left out of its percentiles."""
REQUESTS_MAX = 16
"""Ended requests that one sample shows."""
NAMES_MAX = 16
"""Tenants and classes that one sample names. The others count as `other`."""
OTHER = "other"


class Spread(Struct, frozen=True):
    """Percentiles of the values of one sample."""

    p50: float
    p90: float
    p99: float


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that has ended, for the waterfall of the dashboard."""

    id: str
    unix_s: float
    """Time of its end."""
    outcome: str
    message: str
    """Why it did not finish. Empty: it finished."""
    tenant: str
    service: str
    """Name of its service class. Empty: it has none."""
    prompt_tokens: int
    output_tokens: int
    predicted_ttft_s: float
    """0: nothing was predicted."""
    timings: Timings


@dataclass(slots=True)
class WorkerSteps:
    """The steps of one worker."""

    steps: int = 0
    busy_s: float = 0.0
    """Sum of their durations."""


@dataclass(slots=True)
class Recent:
    """The values since the last sample. Bounded, however much happens and even if nothing takes samples."""

    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Name of a latency or of a ratio to its values."""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, bytes and outcomes, by name."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Refused requests by reason."""
    handoffs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Finished requests by prefill and decode worker."""
    shares: Counter[str] = field(default_factory=Counter)
    """Output tokens by service class, or by tenant if the request has no class."""
    steps: dict[str, WorkerSteps] = field(default_factory=dict)
    ended: list[EndedRequest] = field(default_factory=list)

    def value(self, name: str, value: float) -> None:
        """Add a value of a latency."""
        values = self.latencies.setdefault(name, [])
        if len(values) < VALUES_MAX:
            values.append(value)

    def step(self, report: StepReport) -> None:
        """Add a step of a worker."""
        steps = self.steps.setdefault(report.worker, WorkerSteps())
        steps.steps += 1
        steps.busy_s += report.step_s

    def tokens_sent(self, live: LiveRequest, tokens: int) -> None:
        """Add output tokens that reached a client."""
        self.counts["output_tokens"] += tokens
        service = live.request.service
        _count(self.shares, service.name if service is not None else live.request.tenant, tokens)

    def closed(self, finish: Finish) -> None:
        """Count a request that has ended."""
        self.counts[finish.outcome] += 1
        if finish.reject is not None:
            self.rejected[finish.reject] += 1

    def show(self, live: LiveRequest, finish: Finish, unix_s: float) -> None:
        """Add an ended request whose timings are final. `unix_s`: now."""
        if len(self.ended) >= REQUESTS_MAX:
            return
        service = live.request.service
        self.ended.append(
            EndedRequest(
                id=live.request.id,
                unix_s=unix_s,
                outcome=finish.outcome,
                message=finish.message[:300],
                tenant=live.request.tenant,
                service=service.name if service is not None else "",
                prompt_tokens=live.request.prompt_tokens,
                output_tokens=live.output_tokens,
                predicted_ttft_s=live.predicted.ttft_s,
                timings=live.timings(),
            )
        )

    def handed_off(self, timings: Timings) -> None:
        """Add the way of a delivered request, if another worker than that of its prompt decoded it."""
        if timings.handoff_s is not None and timings.prefill_worker and timings.decode_worker:
            self.handoffs[timings.prefill_worker, timings.decode_worker] += 1

    def spread(self, name: str) -> Spread | None:
        """Return the percentiles of a latency. None: it has no value."""
        values = sorted(self.latencies.get(name, ()))
        return Spread(_nearest(values, 0.5), _nearest(values, 0.9), _nearest(values, 0.99)) if values else None


def _count(counts: Counter[str], name: str, amount: int) -> None:
    counts[name if name in counts or len(counts) < NAMES_MAX else OTHER] += amount


def _nearest(ascending: Sequence[float], share: float) -> float:
    """Return the value below or at which this share of the values lies (nearest rank)."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
