"""Explain one request of a decision log: the decisions about it, the policies' view, and the time of each stage."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from baton.core.copies import CopyEnded
from baton.core.handoff_paths import HandoffView, LinkView, PathChosen
from baton.core.messages import (
    AheadEnded,
    BlocksGranted,
    CloseRequest,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    Outcome,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    SendAhead,
    StartDecode,
    StartPrefill,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import QueuedTooLong, Tick, WaitedTooLong
from baton.core.tier_messages import FromTier
from baton.core.types import RequestId, Slo
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import BeginRequest, ClusterEvent, LoggedCommand, WorkerSaid
from baton.decide.control.decision_log import Decision, coordinator_events, decided
from baton.decide.policy.handoff import central_s
from baton.lab.report.questions import Notes, Question
from baton.lab.report.timeline import FirstTokens

LATEST_MAX = 5
"""Number of request ids to suggest if the requested one is not in the log."""


class Moment(Struct, frozen=True, kw_only=True):
    """One decision that concerns the request."""

    at_s: float
    """Time since the request's arrival."""
    what: str
    questions: tuple[Question, ...] = ()
    """Questions that the policies were asked in this decision."""


class Explanation(Struct, frozen=True, kw_only=True):
    """History of one request. A duration is None if the log does not contain it."""

    request_id: RequestId
    arrived_at_s: float
    """Arrival time on the log's clock."""
    prompt_tokens: int
    output_tokens_max: int
    tenant: str
    priority: int
    service_class: str
    """Service class of the request. Empty: none."""
    slo: Slo | None
    outcome: Outcome | None
    """Outcome of the request. None: it is still open at the end of the log."""
    reason: str
    attempts: int
    queue_s: float | None
    """Time until a worker starts on it. Positive only if it waited in the coordinator's queue."""
    prefill_s: float | None
    """Time from the end of `queue_s` to the first token, including the wait on the worker. None: no first token."""
    ttft_s: float | None
    """Time from arrival to the first token, as observed by the coordinator."""
    predicted_ttft_s: float | None
    """TTFT predicted for the first chosen worker."""
    predicted_tpot_s: float | None
    """TPOT that admission predicted. None: not predicted, as for a request without an SLO."""
    decode_s: float | None
    """Time from the first token to the end, or from the start if there is no first token."""
    e2e_s: float | None
    output_tokens: int | None
    """Number of output tokens. None: the request has not finished, or an old log lacks the number."""
    tpot_s: float | None
    """Mean gap between tokens. None: no time of a first token, or no second token."""
    moments: tuple[Moment, ...]
    differences: int
    """Number of events up to the request's end that the replay decides differently. Above 0 if code or policies
    changed."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a lookup of a request id in a log."""

    ids: tuple[RequestId, ...]
    """Matching requests. A client's id matches every choice of its request: `x` matches `x-17-0` and `x-17-1`."""
    requests: int
    """Number of requests in the log."""
    latest: tuple[RequestId, ...]
    """Latest requests in the log."""


def find_requests(decisions: Iterable[Decision], asked: str) -> Found:
    """Return the requests that match an id: the request's own, or the X-Request-Id of its client."""
    choice = re.compile(rf"{re.escape(asked)}-\d+-\d+")
    ids: list[RequestId] = []
    latest: deque[RequestId] = deque(maxlen=LATEST_MAX)
    requests = 0
    for decision in decisions:
        if isinstance(decision.event, RequestArrived):
            requests += 1
            request_id = decision.event.request.id
            latest.append(request_id)
            if request_id == asked or choice.fullmatch(request_id):
                ids.append(request_id)
    return Found(tuple(ids), requests, tuple(latest))


def explain(cluster: Cluster, notes: Notes, decisions: Iterable[Decision], request_id: str) -> Explanation:
    """Replay the log into a fresh cluster and return the history of one request. Raises LookupError for an unknown id.

    The cluster's policies must be `watched` with `notes`, and `notes.ranked` must be this request.
    """
    arrived: Decision | None = None
    differences = 0
    moments: list[tuple[float, Decision, tuple[Question, ...]]] = []
    for decision in decisions:
        notes.now_s = decision.now_s
        cluster.handle(decision.event, decision.now_s)
        differences += decided(decision.now_s, decision.event, cluster.decided) != decision
        asked = tuple(question for question in notes.questions if question.request_id == request_id)
        notes.questions.clear()
        if isinstance(decision.event, RequestArrived) and decision.event.request.id == request_id:
            arrived = decision
        if arrived is not None and is_about(decision, request_id):
            moments.append((decision.now_s, decision, asked))
            if any(isinstance(c, CloseRequest) and c.request_id == request_id for c in decision.commands):
                break
    if arrived is None:
        raise LookupError(f"no request {request_id!r}")
    return _explanation(arrived, moments, differences)


def is_about(decision: Decision, request_id: str) -> bool:
    """Return whether one of the decision's events or commands is about the request."""
    return any(_about(event) == request_id for event in coordinator_events(decision.event)) or any(
        _about(command) == request_id for command in decision.commands
    )


def _about(message: CoordinatorEvent | LoggedCommand) -> RequestId | None:
    match message:
        case (
            RequestArrived(request=request)
            | StartPrefill(request=request)
            | StartDecode(request=request)
            | SendAhead(request=request)
        ):
            return request.id
        case PathChosen(handoff=handoff):
            return handoff.request.id
        case BeginRequest(request_id=request_id, attempt=attempt) if attempt > 1:
            return request_id
        case ToWorker(command=BlocksGranted(request_id=request_id, attempt=attempt, cached_blocks=blocks)) if blocks:
            return request_id if attempt > 1 else None
        case (
            RequestCancelled(request_id=request_id)
            | PrefillFinished(request_id=request_id)
            | DecodeBegun(request_id=request_id)
            | AheadEnded(request_id=request_id)
            | RequestFinished(request_id=request_id)
            | RequestFailed(request_id=request_id)
            | RequestDropped(request_id=request_id)
            | StopRequest(request_id=request_id)
            | ReleaseBlocks(request_id=request_id)
            | CloseRequest(request_id=request_id)
        ):
            return request_id
        case _:
            return None


def _explanation(
    arrived: Decision, found: list[tuple[float, Decision, tuple[Question, ...]]], differences: int
) -> Explanation:
    assert isinstance(arrived.event, RequestArrived)
    request, start_s = arrived.event.request, arrived.now_s
    commands = [
        (at_s, command) for at_s, decision, _ in found for command in decision.commands if _about(command) == request.id
    ]
    started_s = next((at_s for at_s, command in commands if isinstance(command, StartPrefill)), None)
    first_tokens = FirstTokens()
    tells = [request.id in first_tokens.take(decision) for _, decision, _ in found]
    first_s = next((at_s for (at_s, _, _), is_told in zip(found, tells, strict=True) if is_told), None)
    close = next(((at_s, command) for at_s, command in commands if isinstance(command, CloseRequest)), None)
    end_s = None if close is None or close[1].outcome == "rejected" else close[0]
    decoding_s = first_s if first_s is not None else started_s
    decode_s = _between(decoding_s, end_s)
    events = [
        event for _, decision, _ in found for event in coordinator_events(decision.event) if _about(event) == request.id
    ]
    ends = [event for event in events if isinstance(event, RequestFinished)]
    output_tokens = (ends[-1].output_tokens or None) if ends else None
    gaps = (output_tokens or 1) - 1
    predicted = next((command.predicted for _, command in commands if isinstance(command, StartPrefill)), None)
    questions = [question for _, _, asked in found for question in asked if question.subject == "prefill"]
    chosen = questions[0].option(questions[0].chosen) if questions else None
    return Explanation(
        request_id=request.id,
        arrived_at_s=start_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens_max=request.output_tokens_max,
        tenant=request.tenant,
        priority=request.priority,
        service_class="" if request.service is None else request.service.name,
        slo=request.slo,
        outcome=None if close is None else close[1].outcome,
        reason="" if close is None else close[1].reason,
        attempts=max((c.attempt for _, c in commands if isinstance(c, StartPrefill | StartDecode)), default=0),
        queue_s=_between(start_s, started_s),
        prefill_s=_between(started_s, first_s),
        ttft_s=_between(start_s, first_s),
        predicted_ttft_s=None if chosen is None else chosen.ttft_s,
        predicted_tpot_s=(predicted.tpot_s or None) if predicted is not None else None,
        decode_s=decode_s,
        e2e_s=_between(start_s, end_s),
        output_tokens=output_tokens,
        tpot_s=None if decode_s is None or first_s is None or not gaps else decode_s / gaps,
        moments=tuple(
            Moment(at_s=at_s - start_s, what=_words(decision, request.id, tells_first=is_told), questions=asked)
            for (at_s, decision, asked), is_told in zip(found, tells, strict=True)
        ),
        differences=differences,
    )


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _words(decision: Decision, request_id: RequestId, *, tells_first: bool) -> str:
    """Return a description of the request's events and commands. `tells_first`: the decision shows its first token."""
    events = [event for event in coordinator_events(decision.event) if _about(event) == request_id]
    causes = [_event_words(event, tells_first=tells_first) for event in events] or [_cause_words(decision.event)]
    orders = [_order(command) for command in decision.commands if _about(command) == request_id]
    return "; ".join(word for word in [*causes, *orders] if word)


def _event_words(event: CoordinatorEvent, *, tells_first: bool) -> str:
    match event:
        case RequestArrived(request=request):
            return f"arrived with {request.prompt_tokens:,} prompt tokens"
        case RequestCancelled():
            return "cancelled by its client, or by a stop string"
        case PrefillFinished(worker=worker, computed_tokens=computed_tokens):
            what = "first token from" if tells_first else "prompt computed by"
            return f"{what} {worker}, which holds KV of {computed_tokens:,} tokens"
        case RequestFinished(worker=worker, reason=reason, output_tokens=output_tokens):
            count = f", {output_tokens:,} in all" if output_tokens else ""
            return f"last token from {worker} ({reason}{count})"
        case RequestFailed(worker=worker, reason=reason):
            return f"{worker} cannot compute it: {reason}"
        case RequestDropped(worker=worker):
            return f"{worker} has dropped it"
        case DecodeBegun(worker=worker):
            return f"first token from {worker}, which continues it"
        case _:
            return type(event).__name__


def _cause_words(event: ClusterEvent) -> str:
    """Return a description of an event that concerns more than one request."""
    match event:
        case WaitedTooLong(wait_s=wait_s):
            return f"no worker became available for {wait_s:g} s"
        case QueuedTooLong():
            return "the deadline of the queue has passed"
        case Tick():
            return "a policy moves it to another worker"
        case WorkerLost(worker=worker, reason=reason):
            return f"{worker} was lost: {reason}"
        case HostLost(host=host, reason=reason):
            return f"host {host} was lost: {reason}"
        case WorkerJoined(view=view):
            return f"{view.id} joined"
        case CopyEnded(landed=landed):
            return "a copy of its KV has landed" if landed else "a copy of its KV has failed"
        case FromTier(host=host):
            return f"a tier of {host} has ended a read or a write"
        case WorkerSaid(worker=worker):
            return f"{worker} has reported a step"
        case _:
            return type(event).__name__


def _handoff_text(handoff: HandoffView) -> str:
    """Return a description of the predicted times of each path of a handoff."""
    direct, put, get = (_path_text(path) for path in (handoff.direct, handoff.put, handoff.get))
    pooled = f", {handoff.pooled_tokens:,} of which the pool holds," if handoff.pooled_tokens else ""
    rest = f" and {handoff.rest_s * 1000:,.4g} ms to compute the rest" if handoff.rest_s else ""
    return (
        f"KV of {handoff.tokens:,} tokens{pooled} changes hosts: predicted {direct}, or {put} into the pool and {get} "
        f"out of it{rest}, {central_s(handoff) * 1000:,.4g} ms in all"
    )


def _path_text(path: LinkView) -> str:
    said = [] if path.is_measured else ["not measured"]
    said += [f"failed {path.failed_ago_s:,.3g} s ago"] if path.failed_ago_s < math.inf else []
    remarks = f" ({', '.join(said)})" if said else ""
    return f"{path.expected_s * 1000:,.4g} ms{remarks}"


def _order(command: LoggedCommand) -> str:
    match command:
        case AheadEnded(landed=landed):
            return "the KV sent ahead has landed" if landed else "the KV sent ahead will not land"
        case RequestDropped(worker=worker):
            return f"{worker} no longer has it"
        case StartPrefill():
            return _prefill_text(command)
        case SendAhead(worker=worker, run_tokens=run_tokens, report=report):
            if report:
                return f"its KV so far is sent to {worker} first"
            return f"its KV is sent ahead to {worker}, {run_tokens} tokens at a time"
        case StartDecode(worker=worker, attempt=attempt, source=source):
            pull = f", its KV comes from {source}" if source else ""
            return f"{worker} continues it{pull} (attempt {attempt})"
        case BeginRequest(worker=worker, computed_tokens=tokens):
            return f"{worker} begins with KV of {tokens:,} tokens" if tokens else ""
        case ToWorker(worker=worker, command=BlocksGranted(cached_blocks=blocks)):
            return f"KV of {blocks:,} blocks is cached on the host of {worker}"
        case StopRequest(worker=worker, only_unstarted=only_unstarted):
            return f"{worker} is told to drop it" + (" unless it was in a step" if only_unstarted else "")
        case PathChosen(handoff=handoff, path=path):
            chosen = {"direct": "it goes from host to host", "central": "it goes through the pool"}[path]
            return f"{_handoff_text(handoff)}; {chosen}"
        case CloseRequest(outcome=outcome, reason=reason):
            return f"closed: {outcome}{f', {reason}' if reason else ''}"
        case _:
            return ""


def _prefill_text(command: StartPrefill) -> str:
    how = {"prompt": "last prompt token", "first_token": "first token", "end": "end"}[command.until]
    said = f"{command.worker} computes it to the {how}"
    if command.fetch:
        said += f", with the prefix of {command.fetch}"
    if command.read_tokens:
        said += f", {command.read_tokens:,} tokens of it read from its tiers"
    if command.layer_groups > 1:
        said += f", the end of it sent in {command.layer_groups} groups of layers"
    return f"{said} (attempt {command.attempt})"
