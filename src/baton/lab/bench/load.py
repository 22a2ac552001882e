"""Make the requests of a run and their times."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.lab.bench.options import BenchOptions, ClosedLoop, OpenLoop, Synthetic, TraceFile, TraceTimes
from baton.lab.workload.arrivals import AllAtOnce
from baton.lab.workload.generate import synthetic_trace
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.retime import missing_times_reason, retime
from baton.lab.workload.schedule import fit_context, scale_rate
from baton.lab.workload.source import read_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a run in sending order."""

    source: str
    """The trace's name and format, or `synthetic`, for the report."""
    requests: tuple[TraceRequest, ...]
    shortened: int
    """Requests that were shortened to the context."""

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
    shortened = 0
    if options.context_tokens is not None:
        trace, shortened = fit_context(trace, options.context_tokens)
    return Load(source=source, requests=trace.requests, shortened=shortened)


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
