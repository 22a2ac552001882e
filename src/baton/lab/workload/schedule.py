"""Change the arrival times of a trace, or shorten its requests to a model's context."""

from __future__ import annotations

import math
from random import Random

from msgspec.structs import replace

from baton.lab.workload.arrivals import Arrivals, draw_times_s
from baton.lab.workload.conversation import Turn, link_conversations
from baton.lab.workload.request import Trace, TraceRequest


def scale_rate(trace: Trace, rate_scale: float) -> Trace:
    """Speed the trace up by `rate_scale` (above 0): divide all arrival and think times by it."""
    if rate_scale == 1:
        return trace
    requests = tuple(
        replace(
            request,
            at_s=request.at_s / rate_scale,
            think_s=None if request.think_s is None else request.think_s / rate_scale,
        )
        for request in trace.requests
    )
    return replace(trace, requests=requests)


def cut_trace(trace: Trace, *, start_s: float, duration_s: float | None, skip: int) -> Trace:
    """Keep the requests that arrive within `duration_s` from `start_s` on, without the first `skip`.

    Absolute times are shifted so that the first kept request arrives at 0.
    """
    end_s = math.inf if duration_s is None else start_s + duration_s
    kept = [request for request in trace.requests if start_s <= request.at_s < end_s][skip:]
    from_s = kept[0].at_s if kept and trace.timing == "absolute" else 0.0
    return replace(trace, requests=tuple(replace(request, at_s=request.at_s - from_s) for request in kept))


def spread_arrivals(trace: Trace, spread_s: float) -> Trace:
    """Spread requests with equal times evenly over the next `spread_s`, or until the next logged time if sooner.

    For sources that log in batches: Mooncake's conversation trace has one time for all arrivals within 3 s.
    """
    spaced: list[TraceRequest] = []
    requests = trace.requests
    begin = 0
    while begin < len(requests):
        end = begin
        while end < len(requests) and requests[end].at_s == requests[begin].at_s:
            end += 1
        room_s = min(spread_s, requests[end].at_s - requests[begin].at_s) if end < len(requests) else spread_s
        step_s = room_s / (end - begin)
        spaced += [
            replace(request, at_s=request.at_s + place * step_s) for place, request in enumerate(requests[begin:end])
        ]
        begin = end
    return replace(trace, requests=tuple(spaced))


def redraw_arrivals(trace: Trace, arrivals: Arrivals, draw: Random) -> Trace:
    """Draw new absolute arrival times; keep the order and the lengths.

    `arrivals` gives the times of requests. If times count from the start of a session, or later turns wait for answers
    (closed loop), it gives the times at which sessions start.
    """
    if trace.timing == "session" or any(request.think_s is not None for request in trace.requests):
        return _with_session_starts(trace, arrivals, draw)
    times_s = draw_times_s(arrivals, len(trace.requests), draw)
    requests = tuple(replace(request, at_s=at_s) for request, at_s in zip(trace.requests, times_s, strict=True))
    return replace(trace, timing="absolute", requests=requests)


def mean_rate_rps(trace: Trace) -> float | None:
    """Return the mean rate of a trace. None if it has no times, or only one."""
    if trace.timing != "absolute" or len(trace.requests) < 2:
        return None
    span_s = trace.requests[-1].at_s - trace.requests[0].at_s
    return (len(trace.requests) - 1) / span_s if span_s > 0 else None


def sessions_per_request(trace: Trace) -> float:
    """Return the number of arrivals that `redraw_arrivals` draws per request. Below 1: it draws session starts."""
    if trace.timing != "session" and all(request.think_s is None for request in trace.requests):
        return 1.0
    return len({_session(request, index) for index, request in enumerate(trace.requests)}) / len(trace.requests)


def _session(request: TraceRequest, index: int) -> tuple[str, str, int]:
    """Return the key of a request's session. A request without a session is a session of its own."""
    return request.tenant, request.session, 0 if request.session else index


def _with_session_starts(trace: Trace, arrivals: Arrivals, draw: Random) -> Trace:
    sessions = [_session(request, index) for index, request in enumerate(trace.requests)]
    begins_s = {name: trace.requests[index].at_s for index, name in reversed(list(enumerate(sessions)))}
    names = list(dict.fromkeys(sessions))
    starts_s = dict(zip(names, draw_times_s(arrivals, len(names), draw), strict=True))
    offset = dict.fromkeys(names, 0.0) if trace.timing == "session" else begins_s
    moved = [
        replace(request, at_s=starts_s[name] + request.at_s - offset[name])
        for name, request in zip(sessions, trace.requests, strict=True)
    ]
    moved.sort(key=lambda request: request.at_s)  # stable: requests of one session stay in order
    return replace(trace, timing="absolute", requests=tuple(moved))


def fit_context(trace: Trace, context_tokens: int) -> tuple[Trace, int]:
    """Shorten every request that is longer than the context (at least 2 tokens). Return also how many were shortened.

    The output keeps at most half of the context; the input keeps its leading tokens, so that prefixes stay shared. A
    later turn that exceeds the context is left out, with all turns after it, because it repeats the conversation.
    """
    linked, fitted = link_conversations(trace.requests), dict[int, TraceRequest]()
    for index, opener in linked.openers:
        fitted[index] = last = _fit(opener, context_tokens)
        tokens = last.input_tokens + last.output_tokens
        for turn in linked.take_rest(index):
            known_tokens = last.input_tokens + last.output_tokens
            last = turn.request
            tokens = Turn(turn.index, last, known_tokens).prompt_tokens(tokens) + last.output_tokens
            if tokens > context_tokens:
                break
            fitted[turn.index] = last
    shortened = sum(new is not trace.requests[index] for index, new in fitted.items())
    return replace(trace, requests=tuple(fitted[index] for index in sorted(fitted))), shortened


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
