"""Export a timeline for the Perfetto UI or chrome://tracing: requests per worker over time, and queue lengths.

Source: "Trace Event Format", the JSON that both read.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.lab.report.timeline import RequestLine, Timeline, WorkerLine

WORKERS, REQUESTS = 1, 2
"""Process ids of the trace: one for all workers, one for all requests."""

Event = dict[str, object]


def render_perfetto(timeline: Timeline) -> bytes:
    """Return the timeline as JSON trace events. Times are microseconds since the first event of the log."""
    start_s = timeline.start_s or 0.0
    events = [
        _name(WORKERS, 0, "process_name", "workers"),
        _name(REQUESTS, 0, "process_name", "requests"),
    ]
    for thread, line in enumerate(timeline.workers.values(), start=1):
        events.append(_name(WORKERS, thread, "thread_name", line.worker))
        events += _roles(line, thread, start_s, timeline.end_s)
        events += _counters(line, start_s)
    for line in timeline.requests.values():
        events += _request(line, start_s, timeline.end_s)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _name(process: int, thread: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _stamp(at_s: float, start_s: float) -> float:
    """Return the time in microseconds, the unit of the format."""
    return round((at_s - start_s) * 1e6, 3)


def _roles(line: WorkerLine, thread: int, start_s: float, end_s: float) -> Iterator[Event]:
    """Yield one slice per role on the worker's row."""
    for span in line.roles:
        until_s = end_s if span.end_s is None else span.end_s
        yield {
            "ph": "X",
            "pid": WORKERS,
            "tid": thread,
            "name": span.role,
            "ts": _stamp(span.start_s, start_s),
            "dur": _stamp(until_s, span.start_s),
            "args": {"reason": span.reason},
        }


def _counters(line: WorkerLine, start_s: float) -> Iterator[Event]:
    """Yield counters of a worker's requests and queued tokens, one event per change."""
    before: tuple[int, int, int] | None = None
    for at_s, running, waiting, queued in zip(
        line.times_s, line.running, line.waiting, line.queued_tokens, strict=True
    ):
        if (running, waiting, queued) == before:
            continue
        before = (running, waiting, queued)
        stamp = _stamp(at_s, start_s)
        yield _counter(f"{line.worker} requests", stamp, {"running": running, "waiting": waiting})
        yield _counter(f"{line.worker} queued tokens", stamp, {"tokens": queued})


def _counter(name: str, stamp: float, values: dict[str, int]) -> Event:
    return {"ph": "C", "pid": WORKERS, "name": name, "ts": stamp, "args": values}


def _request(line: RequestLine, start_s: float, end_s: float) -> Iterator[Event]:
    """Yield the row of a request: one slice for the whole request, and nested slices for its workers."""
    closed_s = end_s if line.closed_s is None else line.closed_s
    outcome = line.outcome or "open"
    facts: dict[str, object] = {
        "prompt_tokens": line.request.prompt_tokens,
        "outcome": outcome,
        "reason": line.reason,
        "tenant": line.request.tenant,
    }
    yield _edge(line, "b", line.request.id, _stamp(line.arrived_s, start_s), facts)
    if line.hops:
        yield from _hops(line, closed_s, start_s)
    if line.first_token_s is not None:
        yield _edge(line, "n", "first token", _stamp(line.first_token_s, start_s))
    yield _edge(line, "e", line.request.id, _stamp(closed_s, start_s))


def _hops(line: RequestLine, closed_s: float, start_s: float) -> Iterator[Event]:
    """Yield a slice for each worker of the request, nested inside the slice of the request."""
    stations = [(line.arrived_s, "waits for a worker", 1)] if line.hops[0].at_s > line.arrived_s else []
    stations += [(hop.at_s, f"{hop.stage} on {hop.worker}", hop.attempt) for hop in line.hops]
    ends_s = [at_s for at_s, _, _ in stations[1:]] + [closed_s]
    for (at_s, name, attempt), until_s in zip(stations, ends_s, strict=True):
        yield _edge(line, "b", name, _stamp(at_s, start_s), {"attempt": attempt})
        yield _edge(line, "e", name, _stamp(until_s, start_s))


def _edge(line: RequestLine, phase: str, name: str, stamp: float, facts: dict[str, object] | None = None) -> Event:
    """Return an event on the request's row: begin (b) or end (e) of a slice, or an instant (n).

    Slices close in stack order.
    """
    edge: Event = {"ph": phase, "pid": REQUESTS, "tid": 0, "cat": "request", "id": line.request.id, "name": name}
    return {**edge, "ts": stamp} if facts is None else {**edge, "ts": stamp, "args": facts}
