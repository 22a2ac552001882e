"""Run a benchmark: make the load, probe the server, warm it up, send the requests, summarize."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random

import aiohttp
import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.lab.bench.client import Client, Reply
from baton.lab.bench.drive import LoadGenerator
from baton.lab.bench.options import BenchOptions, ClosedLoop, OpenLoop, Synthetic, TraceFile, TraceTimes
from baton.lab.bench.probe import Target, TargetError, probe
from baton.lab.report.summary import Results, summarize
from baton.lab.report.timeline import Timeline
from baton.lab.workload.arrivals import AllAtOnce
from baton.lab.workload.generate import synthetic_trace
from baton.lab.workload.prompts import PromptMaker
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.retime import missing_times_reason, retime
from baton.lab.workload.schedule import fit_context, scale_rate
from baton.lab.workload.source import read_workload
from baton.move.clock import now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a run in sending order."""

    source: str
    """The trace's name and format, or `synthetic`, for the report."""
    requests: tuple[TraceRequest, ...]
    shortened: int
    """Requests that were shortened to the context."""
    left_out: int
    """Turns that were left out, because their conversations exceed the context."""

    @property
    def converses(self) -> bool:
        """Return whether some requests wait for the answers to others."""
        return any(request.think_s is not None for request in self.requests)


def make_load(options: BenchOptions) -> Load:
    """Draw or read the requests. Equal options give equal loads.

    Raises ConfigError if the trace cannot be read, or has no times and needs --rate or --concurrency.
    """
    draw = Random(options.seed)
    match options.workload:
        case Synthetic(input_tokens, output_tokens):
            source = f"synthetic, {input_tokens} in, {output_tokens} out"
            trace = synthetic_trace(options.requests or 0, (input_tokens, output_tokens), AllAtOnce(), draw)
        case TraceFile() as file:
            trace = _read(file, options)
            source = f"{file.path.name} ({trace.format})"
    trace = _paced(trace, options, draw)
    requests, shortened = len(trace.requests), 0
    if options.context_tokens is not None:
        trace, shortened = fit_context(trace, options.context_tokens)
    return Load(
        source=source, requests=trace.requests, shortened=shortened, left_out=requests - len(trace.requests)
    )  # fmt: skip


def _read(file: TraceFile, options: BenchOptions) -> Trace:
    bounds = [bound for bound in (file.limit, options.requests) if bound is not None]
    trace = read_workload(file.path, seed=options.seed, limit=min(bounds, default=None))
    return scale_rate(trace, file.rate_scale)


def _paced(trace: Trace, options: BenchOptions, draw: Random) -> Trace:
    match options.pacing:
        case OpenLoop(rate_rps, arrivals):
            return retime(trace, arrivals, rate_rps=rate_rps, draw=draw)
        case ClosedLoop():
            return replace(trace, timing="absolute")
        case TraceTimes():
            if trace.timing == "absolute":
                return trace
            raise ConfigError(f"{missing_times_reason(trace)}; give --rate or --concurrency")


WARMUP_TOKENS_MAX = 16
"""Longest output of a warm-up request, which has to run every kernel once."""
_WARMUP_SEED = 0x5EED
"""Changes the seed of warm-up prompts, so that the run finds none of them in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The outcome of a run."""

    options: BenchOptions
    load: Load
    target: Target
    replies: tuple[Reply, ...]
    results: Results
    interrupted: bool
    timeline: Timeline | None = None
    """Load of the workers. None: no page is requested, or the server does not report its workers."""

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Return why requests did not finish, with counts, the most frequent reason first."""
        return Counter(reply.reason for reply in self.replies if reply.reason).most_common()

    @property
    def late_p99_s(self) -> float | None:
        """Return how late the requests of an open loop were sent. None for a closed loop, which has no due times."""
        if isinstance(self.options.pacing, ClosedLoop) or not self.replies:
            return None
        return float(np.quantile([reply.late_s for reply in self.replies], 0.99))

    @property
    def short_answers(self) -> int:
        """Return how many answers have fewer tokens than requested."""
        return sum(
            reply.record.outcome == "finished" and reply.record.output_tokens < reply.asked_tokens
            for reply in self.replies
        )

    @property
    def passed(self) -> bool:
        """Return whether all requests were sent, some finished, none failed, and a given SLO was attained."""
        attained = self.results.slo.attainment_ratio
        in_slo = attained is None or attained >= self.options.attainment_min
        return not self.interrupted and self.results.completed > 0 and self.results.failed == 0 and in_slo


@dataclass(frozen=True, slots=True)
class RunListener:
    """Callbacks of a progress bar. The default ignores all calls."""

    on_start: Callable[[int], None] = lambda requests: None
    on_reply: Callable[[Reply], None] = lambda reply: None


async def run_bench(options: BenchOptions, *, stop: asyncio.Event, watcher: RunListener) -> BenchReport:
    """Measure the server. When `stop` is set, drop the open requests and report the finished ones.

    Raises ConfigError for a bad trace. Raises TargetError if the server cannot be measured, or if the run is stopped
    before the first answer.
    """
    load = make_load(options)
    if load.converses:
        options = _as_text(options)
    began_s = now_s()
    async with Client(options.url, api_key=options.api_key, timeout_s=options.timeout_s) as client:
        target = await probe(client, options)
        await _until_stopped(_warm_up(client, target, load, options), stop)
        driver = LoadGenerator(
            client=client,
            target=target,
            prompts=PromptMaker(seed=options.seed, vocab_tokens=options.vocab_tokens),
            ignore_eos=options.ignore_eos,
            on_reply=watcher.on_reply,
        )
        watcher.on_start(len(load.requests))
        watch = WorkerWatch(client)
        watching = asyncio.create_task(watch.run()) if options.html is not None else None
        await _until_stopped(_drive(driver, load, options), stop)
        if watching is not None:
            watch.ended.set()
            await watching
    if stop.is_set() and not driver.replies:
        raise TargetError("stopped before the first answer; there is nothing to report")
    return BenchReport(
        options=options,
        load=load,
        target=target,
        replies=tuple(driver.replies),
        results=summarize([reply.record for reply in driver.replies], slo=options.slo, wall_s=now_s() - began_s),
        interrupted=stop.is_set(),
        timeline=watch.timeline if watch.timeline.workers else None,
    )


def _as_text(options: BenchOptions) -> BenchOptions:
    """Return the options with text prompts: a turn repeats the previous answer, which the client has as text only."""
    if options.prompt_format == "ids":
        raise ConfigError("--prompt-format ids cannot carry conversations: a turn repeats the text of the answer")
    return dataclasses.replace(options, prompt_format="text")


async def _drive(driver: LoadGenerator, load: Load, options: BenchOptions) -> None:
    if isinstance(options.pacing, ClosedLoop):
        await driver.closed_loop(load.requests, options.pacing.concurrency)
    else:
        await driver.open_loop(load.requests)


async def _warm_up(client: Client, target: Target, load: Load, options: BenchOptions) -> None:
    """Send requests like those of the run and ignore the answers."""
    driver = LoadGenerator(
        client=client,
        target=target,
        prompts=PromptMaker(seed=options.seed ^ _WARMUP_SEED, vocab_tokens=options.vocab_tokens),
        ignore_eos=options.ignore_eos,
    )
    requests = [
        replace(request, output_tokens=min(request.output_tokens, WARMUP_TOKENS_MAX), think_s=None)
        for request in load.requests[: options.warmup]
    ]
    clients = options.pacing.concurrency if isinstance(options.pacing, ClosedLoop) else 1
    await driver.closed_loop(requests, clients)


async def _until_stopped(work: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    """Run `work` to its end, or cancel it when `stop` is set."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, stopping))
    if not working.cancelled():
        working.result()


POLL_S = 0.5
"""Time between two polls: rare enough not to disturb the measurement."""

ANSWER_S = 5.0
"""Time limit of a poll; a slower server is not polled again."""


class _Worker(Struct):
    id: WorkerId
    role: Role
    running: int
    waiting: int


class _Cluster(Struct):
    workers: list[_Worker]


@dataclass(slots=True)
class WorkerWatch:
    """Polls `/cluster`. `timeline` stays empty if the server does not have that path."""

    client: Client
    timeline: Timeline = field(default_factory=Timeline)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Poll until `ended` is set, then once more. Stop early at an answer that does not come from a Baton server."""
        while await self.poll():
            try:
                async with asyncio.timeout(POLL_S):
                    await self.ended.wait()
            except TimeoutError:
                continue
            await self.poll()
            return

    async def poll(self) -> bool:
        """Poll once. Return False if there is no usable answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await self.client.get_at_root("/cluster")
            cluster = msgspec.json.decode(response.body, type=_Cluster)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
            return False
        self._note(cluster, now_s())
        return True

    def _note(self, cluster: _Cluster, moment_s: float) -> None:
        timeline = self.timeline
        timeline.start_s = moment_s if timeline.start_s is None else timeline.start_s
        timeline.end_s = moment_s
        for worker in cluster.workers:
            line = timeline.line(worker.id)
            if not line.roles or line.roles[-1].end_s is not None or line.roles[-1].role != worker.role:
                line.enter(moment_s, worker.role)
            line.report(
                moment_s,
                WorkerView(
                    id=worker.id,
                    host=HostId(""),
                    role=worker.role,
                    running_requests=worker.running,
                    waiting_requests=worker.waiting,
                ),
            )
        gone = set(timeline.workers) - {worker.id for worker in cluster.workers}
        for name in sorted(gone):
            line = timeline.line(name)
            if line.roles[-1].end_s is None:
                line.record_death(moment_s)
