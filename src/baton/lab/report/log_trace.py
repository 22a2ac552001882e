"""Convert the arrivals of a decision log to a trace, to replay or simulate them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean

import msgspec

from baton.core.messages import RequestArrived, RequestFinished
from baton.core.types import BlockHash, Request, RequestId
from baton.decide.control.decision_log import Decision, coordinator_events
from baton.lab.workload.request import Trace, TraceRequest


def trace_of_log(decisions: Iterable[Decision], *, block_tokens: int) -> Trace:
    """Return the requests in order of arrival, starting at 0. Equal leading blocks get equal prefix ids.

    If a request's end is not logged, its output length is the mean of the others, at most `output_tokens_max`. Rejected
    requests are an example.
    """
    arrived: dict[RequestId, tuple[float, Request]] = {}
    answered: dict[RequestId, int] = {}
    for decision in decisions:
        for event in coordinator_events(decision.event):
            match event:
                case RequestArrived(request=request):
                    arrived[request.id] = (decision.now_s, request)
                case RequestFinished(request_id=request_id, output_tokens=output_tokens):
                    if output_tokens:  # a trace request needs at least one output token
                        answered[request_id] = output_tokens
                case _:
                    pass  # only arrivals and output lengths matter here
    usual_tokens = round(fmean(answered.values())) if answered else sys.maxsize
    names: dict[BlockHash, int] = {}
    start_s = next((at_s for at_s, _ in arrived.values()), 0.0)
    requests = tuple(
        TraceRequest(
            at_s=at_s - start_s,
            input_tokens=request.prompt_tokens,
            output_tokens=answered.get(request.id) or min(usual_tokens, request.output_tokens_max),
            prefix_ids=tuple(names.setdefault(block, len(names)) for block in request.block_hashes),
            prefix_block_tokens=block_tokens if request.block_hashes else 0,
            tenant=request.tenant,
            priority=request.priority,
            slo=request.slo,
        )
        for at_s, request in arrived.values()
    )
    return Trace(format="baton", timing="absolute", requests=requests)


def render_trace(trace: Trace) -> bytes:
    """Return the trace as JSON lines, in the format `baton` of docs/workloads.md."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(request) + b"\n" for request in trace.requests)
