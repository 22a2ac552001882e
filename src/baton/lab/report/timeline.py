"""Read a timeline from a decision log: load and role of every worker, and the workers of every request.

The server (`baton serve --log`) and the simulator write the same log, so neither records anything else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import structs

from baton.core.messages import (
    CloseRequest,
    CoordinatorEvent,
    DecodeBegun,
    HostLost,
    Outcome,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.types import HostId, Request, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.cluster_messages import LoggedCommand
from baton.decide.control.decision_log import Decision, coordinator_events


@dataclass(slots=True)
class FirstTokens:
    """Finds first tokens. `take` expects every decision of a log, in order."""

    _left: set[RequestId] = field(default_factory=set[RequestId])
    """Requests whose prefill worker leaves the first token to the decode worker."""

    def take(self, decision: Decision) -> list[RequestId]:
        """Return the requests whose first token this decision reports. A failover may report a request again."""
        told: list[RequestId] = []
        for event in coordinator_events(decision.event):
            match event:
                case PrefillFinished(request_id=request_id) if request_id not in self._left:
                    told.append(request_id)
                case DecodeBegun(request_id=request_id) | RequestFinished(request_id=request_id, output_tokens=1):
                    told.append(request_id)
                case _:
                    pass  # other events report no first token
        for command in decision.commands:
            if isinstance(command, StartPrefill) and command.until == "prompt":
                self._left.add(command.request.id)
            elif isinstance(command, StartPrefill):
                self._left.discard(command.request.id)
            elif isinstance(command, CloseRequest):
                self._left.discard(command.request_id)
        return told


Stage = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """Time span of a worker in one role. `end_s` is None if the span lasts until the log's end."""

    start_s: float
    end_s: float | None
    role: Role
    reason: str = ""
    """Why a policy chose the role. Empty: not known."""


@dataclass(slots=True)
class WorkerLine:
    """Load and roles of one worker over time. Each entry of the lists is valid until the next.

    The load comes from the worker's reports and from the requests assigned since. Between two roles the worker is dead.
    """

    worker: WorkerId
    host: HostId | None = None
    """Host of the worker when it joined."""
    times_s: array[float] = field(default_factory=lambda: array("d"))
    running: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))
    queued_tokens: array[int] = field(default_factory=lambda: array("q"))
    roles: list[RoleSpan] = field(default_factory=list[RoleSpan])

    def report(self, now_s: float, view: WorkerView) -> None:
        self._note(now_s, (view.running_requests, view.waiting_requests, view.queued_tokens))

    def take(self, now_s: float, start: StartPrefill | StartDecode) -> None:
        """Add a request that was assigned to the worker.

        The worker itself reports it only after the first step that includes it.
        """
        running, waiting, queued_tokens = self.last
        if isinstance(start, StartPrefill):
            queued_tokens += start.request.prompt_tokens
        waits = isinstance(start, StartPrefill) and running + waiting > 0
        self._note(now_s, (running + (not waits), waiting + waits, queued_tokens))

    @property
    def last(self) -> tuple[int, int, int]:
        """Running and waiting requests, and queued prompt tokens, as last known."""
        return (self.running[-1], self.waiting[-1], self.queued_tokens[-1]) if self.times_s else (0, 0, 0)

    def _note(self, now_s: float, load: tuple[int, int, int]) -> None:
        self.times_s.append(now_s)
        for values, value in zip((self.running, self.waiting, self.queued_tokens), load, strict=True):
            values.append(value)

    def enter(self, now_s: float, role: Role, reason: str = "") -> None:
        """Start a role and end the previous one."""
        self.leave(now_s)
        self.roles.append(RoleSpan(now_s, None, role, reason))

    def leave(self, now_s: float) -> None:
        if self.roles and self.roles[-1].end_s is None:
            self.roles[-1] = replace(self.roles[-1], end_s=now_s)

    def record_death(self, now_s: float) -> None:
        """Record the worker's death: its role ends and its load is 0."""
        self.leave(now_s)
        self._note(now_s, (0, 0, 0))


@dataclass(frozen=True, slots=True)
class Hop:
    """Start of a request on a worker."""

    at_s: float
    stage: Stage
    worker: WorkerId
    attempt: int


@dataclass(slots=True)
class RequestLine:
    """History of one request, on the log's clock."""

    request: Request
    arrived_s: float
    hops: list[Hop] = field(default_factory=list[Hop])
    first_token_s: float | None = None
    """Time of the first token. None: the request produced none."""
    closed_s: float | None = None
    outcome: Outcome | None = None
    reason: str = ""


@dataclass(slots=True)
class Timeline:
    """Timeline of a log. Pass every decision to `take`, in order, then read the fields.

    Memory grows with the log: four numbers per report or start, and one `RequestLine` per request.
    """

    start_s: float | None = None
    end_s: float = 0.0
    workers: dict[WorkerId, WorkerLine] = field(default_factory=dict[WorkerId, WorkerLine])
    requests: dict[RequestId, RequestLine] = field(default_factory=dict[RequestId, RequestLine])
    _first_tokens: FirstTokens = field(default_factory=FirstTokens)

    def take(self, decision: Decision) -> None:
        """Add the next decision of the log."""
        now_s = decision.now_s
        self.start_s = now_s if self.start_s is None else self.start_s
        self.end_s = now_s
        for event in coordinator_events(decision.event):
            self._event(event, now_s)
        for request_id in self._first_tokens.take(decision):
            begun = self.requests.get(request_id)
            if begun is not None and begun.first_token_s is None:
                begun.first_token_s = now_s
        for command in decision.commands:
            self._command(command, now_s)

    def _event(self, event: CoordinatorEvent, now_s: float) -> None:
        match event:
            case WorkerJoined(view=view):
                line = self.line(view.id)
                line.host = view.host
                line.enter(now_s, view.role)
            case WorkerReported(view=view):
                self.line(view.id).report(now_s, view)
            case WorkerLost(worker=worker):
                self.line(worker).record_death(now_s)
            case HostLost(host=host):
                for line in self.workers.values():
                    if line.host == host:
                        line.record_death(now_s)
            case RoleSet(worker=worker, role=role):
                self.line(worker).enter(now_s, role)
            case RequestArrived(request=request):
                self.requests[request.id] = RequestLine(request, now_s)
            case _:
                pass  # other events do not show in a timeline

    def _command(self, command: LoggedCommand, now_s: float) -> None:
        match command:
            case StartPrefill() | StartDecode():
                stage: Stage = "prefill" if isinstance(command, StartPrefill) else "decode"
                hop = Hop(now_s, stage, command.worker, command.attempt)
                self.requests[command.request.id].hops.append(hop)
                self.line(command.worker).take(now_s, command)
            case CloseRequest(request_id=request_id, outcome=outcome, reason=reason):
                line = self.requests[request_id]
                line.closed_s, line.outcome, line.reason = now_s, outcome, reason
            case SetRole(worker=worker, role=role, reason=reason):
                self.line(worker).enter(now_s, role, reason)
            case _:
                pass

    def line(self, worker: WorkerId) -> WorkerLine:
        """Return the line of a worker. Create it on first use."""
        return self.workers.setdefault(worker, WorkerLine(worker))


def join_timelines(cells: Sequence[Timeline]) -> Timeline:
    """Return one timeline for all cells of a fleet.

    Each name gets its cell as a prefix: `c2/decode-0` is the worker decode-0 of cell 2.
    """
    starts_s = [cell.start_s for cell in cells if cell.start_s is not None]
    joined = Timeline(start_s=min(starts_s, default=None), end_s=max((cell.end_s for cell in cells), default=0.0))
    for number, cell in enumerate(cells):
        for line in cell.workers.values():
            named = _worker_of(number, line.worker)
            host = None if line.host is None else HostId(f"c{number}/{line.host}")
            joined.workers[named] = replace(line, worker=named, host=host)
        for line in cell.requests.values():
            request = structs.replace(line.request, id=RequestId(f"c{number}/{line.request.id}"))
            hops = [replace(hop, worker=_worker_of(number, hop.worker)) for hop in line.hops]
            joined.requests[request.id] = replace(line, request=request, hops=hops)
    return joined


def _worker_of(cell: int, worker: WorkerId) -> WorkerId:
    return WorkerId(f"c{cell}/{worker}")


def read_timeline(decisions: Iterable[Decision]) -> Timeline:
    """Return the timeline of a whole log."""
    timeline = Timeline()
    for decision in decisions:
        timeline.take(decision)
    return timeline
