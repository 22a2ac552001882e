"""Give the requests of a trace other times, or fit them into a model's context."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from baton.workload.arrivals import Arrivals
from baton.workload.request import Trace, TraceRequest


def scale_rate(trace: Trace, rate_scale: float) -> Trace:
    """Play the trace `rate_scale` times as fast (above 0): all times are divided by it."""
    requests = tuple(replace(request, at_s=request.at_s / rate_scale) for request in trace.requests)
    return replace(trace, requests=requests)


def with_arrivals(trace: Trace, arrivals: Arrivals, draw: Random) -> Trace:
    """Keep the order and the lengths, and draw new times. Where times count from a session's start, starts are drawn.

    `arrivals` gives the times of requests (absolute, none) or of session starts (session); the result is absolute.
    """
    if trace.timing == "session":
        return _with_session_starts(trace, arrivals, draw)
    times_s = arrivals.times_s(len(trace.requests), draw)
    requests = tuple(replace(request, at_s=at_s) for request, at_s in zip(trace.requests, times_s, strict=True))
    return replace(trace, timing="absolute", requests=requests)


def session_count(requests: Sequence[TraceRequest]) -> int:
    return len({request.session for request in requests})


def _with_session_starts(trace: Trace, arrivals: Arrivals, draw: Random) -> Trace:
    sessions = list(dict.fromkeys(request.session for request in trace.requests))
    starts_s = dict(zip(sessions, arrivals.times_s(len(sessions), draw), strict=True))
    moved = [replace(request, at_s=starts_s[request.session] + request.at_s) for request in trace.requests]
    moved.sort(key=lambda request: request.at_s)  # stable: calls of one session stay in order
    return replace(trace, timing="absolute", requests=tuple(moved))


def fit_context(trace: Trace, context_tokens: int) -> tuple[Trace, int]:
    """Shorten every request that is longer than the context (at least 2 tokens); also say how many were.

    The output keeps its length up to half of the context, the input keeps its leading tokens, so prefixes survive.
    """
    fitted = [_fit(request, context_tokens) for request in trace.requests]
    shortened = sum(new is not old for new, old in zip(fitted, trace.requests, strict=True))
    return replace(trace, requests=tuple(fitted)), shortened


def _fit(request: TraceRequest, context_tokens: int) -> TraceRequest:
    if request.input_tokens + request.output_tokens <= context_tokens:
        return request
    output_tokens = min(request.output_tokens, context_tokens // 2)
    input_tokens = min(request.input_tokens, context_tokens - output_tokens)
    blocks = -(-input_tokens // request.prefix_block_tokens) if request.prefix_block_tokens else 0
    return replace(
        request,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        prefix_ids=request.prefix_ids[:blocks],
    )
