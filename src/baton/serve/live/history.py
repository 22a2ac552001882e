"""Keep the measurements of the last 15 minutes, one sample per second, for the dashboard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from msgspec import Struct, json

from baton.core.types import Slo
from baton.move.clock import now_s, utc_date
from baton.serve.live.gateway import LiveGateway
from baton.serve.live.recent import EndedRequest, Recent, Spread, WorkerSteps, spreads
from baton.serve.live.recorder import Recorder
from baton.serve.live.status import ClusterStatus, HostStatus, TierStatus, WorkerStatus

SAMPLE_S = 1.0
KEPT_SAMPLES = 900
"""Number of samples that are kept: 15 minutes."""
LATENCY_SAMPLES = 10
"""Percentiles use values of at most so many samples."""
MARKS_MAX = 8
"""Maximum changes of the fleet that one sample names."""


class WorkerSample(Struct, frozen=True, kw_only=True):
    """The load of one worker."""

    id: str
    host: str
    role: str
    state: str
    running: int
    waiting: int
    steps: int
    step_requests: float
    """Mean number of requests in a step. 0: it ran none."""
    busy_ratio: float
    """Share of the elapsed time in which it ran steps."""


class HostSample(Struct, frozen=True, kw_only=True):
    """The KV blocks of one host."""

    id: str
    used: int
    cached: int
    free: int
    block_bytes: int
    tiers: tuple[TierStatus, ...] = ()


class Link(Struct, frozen=True):
    """Requests that were handed from one worker to another."""

    source: str
    target: str
    requests: int


class HostLink(Struct, frozen=True):
    """KV that was copied from one host to another."""

    source: str
    target: str
    bytes: int
    copy_s: float
    """Sum of the copies' durations."""
    overlap_s: float
    """The part of it in which the prompt was still computed."""


class Sample(Struct, frozen=True, kw_only=True):
    """What happened since the last sample, and the loads at its end."""

    unix_s: float
    elapsed_s: float
    """Time since the last sample."""
    state: str
    """State of the server, as in /health."""
    latencies: dict[str, Spread]
    """Seconds: `ttft`, `itl`, `tpot`, `queue`, `prefill`, `handoff`, `decode_queue`.
    Measured / predicted: `ttft_ratio`, `tpot_ratio`.

    Percentiles of the last second, or, of fewer than 100 values, of up to 10 s. A latency without values is left out.
    """
    counts: dict[str, int]
    """Tokens: `prompt_tokens`, `cached_tokens`, `output_tokens`. Bytes: `handoff_bytes`. Requests: `with_slo` and
    `in_slo` of the delivered ones, and a count for each outcome. Events: `failovers`, `preemptions`, `moves`."""
    rejected: dict[str, int]
    """Refused requests by reason."""
    tenants: dict[str, int]
    """Output tokens by tenant. The empty name: requests without a tenant."""
    classes: dict[str, int]
    """Output tokens by service class. The empty name: requests without a class."""
    handoffs: tuple[Link, ...]
    copies: tuple[HostLink, ...]
    workers: tuple[WorkerSample, ...]
    hosts: tuple[HostSample, ...]
    ended: tuple[EndedRequest, ...]
    marks: tuple[str, ...]
    """Changes of the fleet, as text: workers and hosts that joined or were lost, and role changes."""


class Opening(Struct, frozen=True, kw_only=True):
    """The first message of the dashboard's stream."""

    model: str
    slo: Slo | None
    policy: dict[str, str]
    """Short name or `module:Class` of the policy of each family."""
    sample_s: float
    kept_samples: int
    past_samples: int
    """Number of samples that follow at once. Later ones follow each second."""
    has_log: bool
    """The server keeps a decision log, so that it can explain requests."""


class History:
    """Takes samples, keeps the latest ones as JSON, and streams them to any number of readers."""

    def __init__(self, gateway: LiveGateway, recorder: Recorder) -> None:
        self._gateway = gateway
        self._recorder = recorder
        self._samples: deque[bytes] = deque(maxlen=KEPT_SAMPLES)
        self._latencies: deque[dict[str, list[float]]] = deque(maxlen=LATENCY_SAMPLES)
        """Values of each latency, the latest sample first."""
        self._taken = 0
        """Number of samples taken so far."""
        self._sampled_at_s = now_s()
        self._last: ClusterStatus | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    async def run(self) -> None:
        """Take a sample every second, until `close`."""
        while not self._is_closed:
            await asyncio.sleep(SAMPLE_S)
            self.take()

    def take(self) -> None:
        """Take a sample now, and wake the readers."""
        moment_s, cluster = now_s(), self._gateway.cluster()
        elapsed_s, self._sampled_at_s = max(1e-3, moment_s - self._sampled_at_s), moment_s
        recent = self._recorder.take_recent()
        marks = _marks(self._last, cluster) if self._last is not None else ()
        self._latencies.appendleft(recent.latencies)
        sample = _sample(recent, spreads(self._latencies), cluster, marks, elapsed_s, self._gateway.state)
        self._samples.append(json.encode(sample))
        self._last = cluster
        self._taken += 1
        self._wake()

    def close(self) -> None:
        """End every reader's stream."""
        self._is_closed = True
        self._wake()

    async def follow(self, past_samples: int = KEPT_SAMPLES) -> AsyncIterator[bytes]:
        """Yield the opening, at most `past_samples` kept samples, and then each new sample, as JSON.

        A reader that falls more than 15 minutes behind misses the samples that were dropped meanwhile.
        """
        gateway = self._gateway
        past_samples = min(past_samples, len(self._samples))
        sent = self._taken - past_samples
        yield json.encode(
            Opening(
                model=gateway.card.name,
                slo=gateway.slo,
                policy=gateway.cluster().policy,
                sample_s=SAMPLE_S,
                kept_samples=KEPT_SAMPLES,
                past_samples=past_samples,
                has_log=gateway.decision_log is not None,
            )
        )
        while not self._is_closed:
            sent = max(sent, self._taken - len(self._samples))
            if sent == self._taken:
                await self._changed.wait()
                continue
            sample = self._samples[sent - self._taken]
            sent += 1
            yield sample

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if self._is_closed:
            self._changed.set()


def _sample(
    recent: Recent,
    latencies: dict[str, Spread],
    cluster: ClusterStatus,
    marks: tuple[str, ...],
    elapsed_s: float,
    state: str,
) -> Sample:
    return Sample(
        unix_s=round(utc_date().timestamp(), 3),
        elapsed_s=elapsed_s,
        state=state,
        latencies=latencies,
        counts=dict(recent.counts),
        rejected=dict(recent.rejected),
        tenants=dict(recent.tenants),
        classes=dict(recent.classes),
        handoffs=tuple(Link(*way, requests) for way, requests in recent.handoffs.items()),
        copies=tuple(HostLink(*way, sums.bytes, sums.copy_s, sums.overlap_s) for way, sums in recent.copies.items()),
        workers=tuple(
            _worker_sample(worker, recent.steps.get(worker.id, WorkerSteps()), elapsed_s) for worker in cluster.workers
        ),
        hosts=tuple(_host_sample(host) for host in cluster.hosts),
        ended=tuple(recent.ended),
        marks=marks,
    )


def _worker_sample(worker: WorkerStatus, steps: WorkerSteps, elapsed_s: float) -> WorkerSample:
    return WorkerSample(
        id=worker.id,
        host=worker.host,
        role=worker.role,
        state=worker.state,
        running=worker.running,
        waiting=worker.waiting,
        steps=steps.steps,
        step_requests=round(steps.requests / max(1, steps.steps), 2),
        busy_ratio=round(min(1.0, steps.busy_s / elapsed_s), 3),
    )


def _host_sample(host: HostStatus) -> HostSample:
    return HostSample(
        id=host.id,
        used=host.kv_blocks_used,
        cached=host.kv_blocks_cached,
        free=host.kv_blocks_free,
        block_bytes=host.kv_block_bytes,
        tiers=host.tiers,
    )


def _marks(before: ClusterStatus, now: ClusterStatus) -> tuple[str, ...]:
    """Describe the changes of the fleet between two samples, one text for each change."""
    marks: list[str] = []
    old = {worker.id: worker for worker in before.workers}
    new = {worker.id: worker for worker in now.workers}
    for name, worker in new.items():
        known = old.get(name)
        if known is None:
            marks.append(f"{name} was added as {worker.role}")
            continue
        if known.role != worker.role:
            reason = f" ({worker.role_reason})" if worker.role_reason else ""
            marks.append(f"{name}: {known.role} to {worker.role}{reason}")
        if known.state == "ready" and (worker.state != "ready" or known.pid != worker.pid):
            if name in before.restarting:
                marks.append(f"{name} restarts")
            else:
                marks.append(f"{name} was lost" + (" and is ready again" if worker.state == "ready" else ""))
        elif known.state != "ready" and worker.state == "ready":
            marks.append(f"{name} is ready")
    marks += [f"{name} has left" for name in old if name not in new]
    hosts = {host.id for host in before.hosts}, {host.id for host in now.hosts}
    marks += [f"host {name} was lost" for name in sorted(hosts[0] - hosts[1])]
    marks += [f"host {name} has joined" for name in sorted(hosts[1] - hosts[0])]
    return tuple(marks[:MARKS_MAX])
