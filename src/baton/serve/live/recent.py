"""Collect what happened since the last sample of the history: latencies, tokens, handoffs, and ended requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from baton.core.messages import StepReport
from baton.core.types import HostId
from baton.serve.live.live_request import Finish, LiveRequest, Timings

VALUES_MAX = 4096
"""Maximum values of one latency in one sample. Further values do not count for the percentiles."""
ENOUGH_VALUES = 100
"""With fewer values of a latency, its percentiles include those of earlier samples."""
REQUESTS_MAX = 16
"""Maximum ended requests that one sample shows."""
NAMES_MAX = 16
"""Maximum tenants and classes that one sample names. The others count as `other`."""
OTHER = "other"


class Spread(Struct, frozen=True):
    """Percentiles of the latest values of a latency."""

    p50: float
    p90: float
    p99: float


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that has ended, for the waterfall of the dashboard."""

    id: str
    unix_s: float
    """Unix time at which the request ended."""
    outcome: str
    message: str
    """Reason why the request failed. Empty: it finished."""
    tenant: str
    service: str
    """Name of the request's service class. Empty: it has none."""
    prompt_tokens: int
    output_tokens: int
    predicted_ttft_s: float
    """TTFT as predicted when the request was routed. 0: there was no prediction."""
    timings: Timings


@dataclass(slots=True)
class WorkerSteps:
    """The steps of one worker."""

    steps: int = 0
    busy_s: float = 0.0
    """Sum of the steps' durations."""
    requests: int = 0
    """Sum of the requests in each step."""


@dataclass(slots=True)
class HostCopies:
    """Copies of KV from one host to another."""

    bytes: int = 0
    copy_s: float = 0.0
    """Sum of the copies' durations."""
    overlap_s: float = 0.0
    """The part of it in which the prompt was still computed."""


@dataclass(slots=True)
class Recent:
    """The measurements since the last sample. Their memory is bounded, even if no sample is taken."""

    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Values of each latency (seconds) and each ratio, by its name."""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, bytes and outcomes, by name."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Refused requests by reason."""
    handoffs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of delivered requests by (prefill worker, decode worker)."""
    copies: dict[tuple[HostId, HostId], HostCopies] = field(default_factory=dict)
    """Copies of KV by (source host, target host)."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Output tokens by tenant. The empty name: requests without a tenant."""
    classes: Counter[str] = field(default_factory=Counter)
    """Output tokens by service class. The empty name: requests without a class."""
    steps: dict[str, WorkerSteps] = field(default_factory=dict)
    ended: list[EndedRequest] = field(default_factory=list)

    def value(self, name: str, value: float) -> None:
        values = self.latencies.setdefault(name, [])
        if len(values) < VALUES_MAX:
            values.append(value)

    def step(self, report: StepReport) -> None:
        steps = self.steps.setdefault(report.worker, WorkerSteps())
        steps.steps += 1
        steps.busy_s += report.step_s
        steps.requests += report.view.running_requests

    def copied(self, way: tuple[HostId, HostId], copy: HostCopies) -> None:
        """Add a copy from one host to another."""
        self.counts["handoff_bytes"] += copy.bytes
        sums = self.copies.setdefault(way, HostCopies())
        sums.bytes += copy.bytes
        sums.copy_s += copy.copy_s
        sums.overlap_s += copy.overlap_s

    def tokens_sent(self, live: LiveRequest, tokens: int) -> None:
        """Add output tokens that reached a client."""
        self.counts["output_tokens"] += tokens
        service = live.request.service
        _count(self.tenants, live.request.tenant, tokens)
        _count(self.classes, service.name if service is not None else "", tokens)

    def closed(self, finish: Finish) -> None:
        """Count a request that has ended."""
        self.counts[finish.outcome] += 1
        if finish.reject is not None:
            self.rejected[finish.reject] += 1

    def show(self, ended: EndedRequest) -> None:
        """Add an ended request to those that the sample shows."""
        if len(self.ended) < REQUESTS_MAX:
            self.ended.append(ended)

    def handed_off(self, timings: Timings) -> None:
        """Count the handoff of a delivered request, if its prefill worker and its decode worker differ."""
        if timings.handoff_s is not None and timings.prefill_worker and timings.decode_worker:
            self.handoffs[timings.prefill_worker, timings.decode_worker] += 1


def spreads(samples: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Spread]:
    """Return the percentiles of each latency, by name. `samples`: values by latency, the latest sample first.

    A sample with few values says little about a percentile, so earlier ones are added up to `ENOUGH_VALUES`.
    """
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, values in sample.items():
            known = found.setdefault(name, [])
            if len(known) < ENOUGH_VALUES:
                known += values
    return {name: _spread(sorted(values)) for name, values in found.items() if values}


def _spread(ascending: Sequence[float]) -> Spread:
    return Spread(*(_nearest(ascending, share) for share in (0.5, 0.9, 0.99)))


def ended_request(live: LiveRequest, finish: Finish, unix_s: float) -> EndedRequest:
    """Return an ended request with its final timings. `unix_s`: the current time."""
    service = live.request.service
    return EndedRequest(
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


def _count(counts: Counter[str], name: str, amount: int) -> None:
    counts[name if name in counts or len(counts) < NAMES_MAX else OTHER] += amount


def _nearest(ascending: Sequence[float], share: float) -> float:
    """Return the percentile `share` (0..1) of sorted values by nearest rank: that share of them does not exceed it."""
    return ascending[math.ceil(round(share * len(ascending), 6)) - 1]
