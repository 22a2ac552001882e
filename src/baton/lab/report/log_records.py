"""Reduce a decision log to the metrics of its requests, or to a trace of its arrivals, for other runs."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
from msgspec import Struct

from baton.core.messages import CloseRequest, RequestArrived, RequestFinished
from baton.core.types import BlockHash, Request, RequestId
from baton.decide.control.decision_log import Decision, coordinator_events
from baton.lab.report.summary import Distribution, RequestRecord, SloTargets, summarize
from baton.lab.report.timeline import FirstTokens
from baton.lab.workload.request import Trace, TraceRequest


class Outcomes(Struct, frozen=True, kw_only=True):
    """Metrics that both a log and a simulation provide. Null: unknown, or not measured."""

    requests: int
    completed: int
    failed: int
    rejected: int
    """Requests that a policy rejected."""
    no_worker: int
    """Accepted requests that were rejected because no worker was available within `survival.wait_s`. They are counted
    apart because no policy decided this."""
    ttft_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    attainment_ratio: float | None
    """Share of the requests that met their SLO."""
    goodput_rps: float | None


@dataclass(slots=True)
class _OpenRequest:
    """State of one open request of the log."""

    request: Request
    arrived_s: float
    first_s: float | None = None
    """Time of the first token."""
    output_tokens: int = 0


@dataclass(slots=True)
class LoggedRun:
    """Closed requests of a log."""

    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    """The first and the last token have their logged times; the others are spaced evenly between. TTFT, TPOT and E2E
    are exact, but gaps between tokens are not."""
    untimed: int = 0
    """Number of finished requests without a logged time of the first token."""
    open: int = 0
    """Number of requests that are still open at the end of the log."""
    _opened: dict[RequestId, _OpenRequest] = field(default_factory=dict[RequestId, _OpenRequest])
    _first_tokens: FirstTokens = field(default_factory=FirstTokens)

    def take(self, decision: Decision) -> None:
        now_s = decision.now_s
        for request_id in self._first_tokens.take(decision):
            opened = self._opened.get(request_id)
            if opened is not None and opened.first_s is None:
                opened.first_s = now_s
        for event in coordinator_events(decision.event):
            match event:
                case RequestArrived(request=request):
                    self._opened[request.id] = _OpenRequest(request, now_s)
                case RequestFinished(request_id=request_id, output_tokens=output_tokens) if request_id in self._opened:
                    self._opened[request_id].output_tokens = output_tokens
                case _:
                    pass  # other events do not change a record
        for command in decision.commands:
            if isinstance(command, CloseRequest) and command.request_id in self._opened:
                self._close(self._opened.pop(command.request_id), command, now_s)
        self.open = len(self._opened)

    def _close(self, opened: _OpenRequest, close: CloseRequest, now_s: float) -> None:
        times_s = array("d")
        if close.outcome == "finished":
            times_s = _token_times(opened.first_s, now_s, opened.output_tokens)
            self.untimed += not times_s
        self.records.append(
            RequestRecord(
                arrival_s=opened.arrived_s,
                end_s=now_s,
                outcome=close.outcome,
                reject=close.reject,
                input_tokens=opened.request.prompt_tokens,
                token_times_s=times_s,
                slo=opened.request.slo,
                tenant=opened.request.tenant,
            )
        )


def run_of_log(decisions: Iterable[Decision]) -> LoggedRun:
    """Return the run of a log. It has no record of requests that are still open at the log's end."""
    run = LoggedRun()
    for decision in decisions:
        run.take(decision)
    return run


def outcomes(records: Sequence[RequestRecord], targets: SloTargets, *, is_timed: bool = True) -> Outcomes:
    """Return the metrics of a run that a log provides too.

    With `is_timed` false, some first tokens have no time, so SLO attainment and goodput are null.
    """
    results = summarize(records, slo=targets, wall_s=0.0)
    no_worker = sum(record.reject == "no_worker" for record in records)
    return Outcomes(
        requests=results.requests,
        completed=results.completed,
        failed=results.failed,
        rejected=results.rejected - no_worker,
        no_worker=no_worker,
        ttft_s=results.ttft_s,
        tpot_s=results.tpot_s,
        e2e_s=results.e2e_s,
        attainment_ratio=results.slo.attainment_ratio if is_timed else None,
        goodput_rps=results.goodput_rps if is_timed else None,
    )


def _token_times(first_s: float | None, last_s: float, tokens: int) -> array[float]:
    """Return evenly spaced times of `tokens` tokens, or an empty array if the first time is unknown."""
    if first_s is None or not tokens:
        return array("d")
    gap_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0
    return array("d", [first_s + gap_s * place for place in range(tokens)])


def trace_of_log(decisions: Iterable[Decision], *, block_tokens: int) -> Trace:
    """Return the requests in order of arrival, starting at 0. Equal leading blocks get equal prefix ids.

    Some requests have no logged end: they were rejected, for example. Their output length is the mean of the others, at
    most `output_tokens_max`.
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
    block_ids: dict[BlockHash, int] = {}
    start_s = next((at_s for at_s, _ in arrived.values()), 0.0)
    requests = tuple(
        TraceRequest(
            at_s=at_s - start_s,
            input_tokens=request.prompt_tokens,
            output_tokens=answered.get(request.id) or min(usual_tokens, request.output_tokens_max),
            prefix_ids=tuple(block_ids.setdefault(block, len(block_ids)) for block in request.block_hashes),
            prefix_block_tokens=block_tokens if request.block_hashes else 0,
            tenant=request.tenant,
            client=request.client,
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
