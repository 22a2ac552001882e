"""Cells: past what one server decides, a fleet is several small ones, each with a server and hosts of its own."""

from __future__ import annotations

from zlib import crc32

from msgspec.structs import replace

from baton.workload.request import Trace, TraceRequest


def deal(trace: Trace, cells: int) -> list[Trace]:
    """Give every request of a trace to a cell, in the trace's order within each.

    Turns of one session go to one cell, by a hash of its name, since that is where their prefix is; all others in turn.
    """
    dealt: list[list[TraceRequest]] = [[] for _ in range(cells)]
    turn = 0
    for request in trace.requests:
        if request.session:
            dealt[crc32(request.session.encode()) % cells].append(request)
        else:
            dealt[turn % cells].append(request)
            turn += 1
    return [replace(trace, requests=tuple(requests)) for requests in dealt]
