"""What policies choose beside a worker for a request, answered by two sets of policies at the same time.

Each question is asked of both, with the same inputs; the first one's answer is followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from baton.core.messages import CloseRequest, CoordinatorCommand, StartPrefill
from baton.core.ports import CostModel
from baton.core.types import ROLES, ClusterView, FlightView, LoadWindow, RequestId, Role, WorkerId
from baton.decide.control.advice import Policies, PolicyFailure, asked

NAMED_MAX = 4
"""Workers or requests of one answer that are named."""

Decided = Literal[
    "admit", "prefill", "decode", "first_token", "streaming", "layers", "way", "order", "roles", "scaling", "moves"
]
"""Every kind of decision that a log holds. What workers and pools decide for themselves (who is in a step, what is
evicted or preempted) is in no log: that is what simulating is for."""


class Choice(Struct, frozen=True, kw_only=True):
    """One question, and both answers in words."""

    subject: Decided
    request_id: RequestId
    """Empty: it is about the fleet."""
    recorded: str
    other: str
    differs: bool
    """Also where what differs is behind the names that the words give."""
    recorded_s: float | None = None
    """What is predicted of the recorded answer, where something is."""
    other_s: float | None = None


@dataclass(slots=True)
class Choices:
    """What was chosen since it was last emptied."""

    _noted: dict[tuple[Decided, RequestId], Choice] = field(default_factory=dict[tuple[Decided, RequestId], Choice])

    def note(self, choice: Choice) -> None:
        """Keep an answer. A question that is asked again because of one event counts once."""
        self._noted[choice.subject, choice.request_id] = choice

    def said(
        self,
        subject: Decided,
        request_id: RequestId,
        recorded: str,
        other: str,
        both_s: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """Keep two answers of one word each, with what is predicted of both."""
        recorded_s, other_s = both_s
        differs = recorded != other
        self.note(
            Choice(
                subject=subject,
                request_id=request_id,
                recorded=recorded,
                other=other,
                differs=differs,
                recorded_s=recorded_s,
                other_s=other_s,
            )
        )

    def taken(self, commands: Iterable[CoordinatorCommand]) -> list[Choice]:
        """Return what was chosen because of an event, and forget it.

        In what runs KV is sent ahead is asked of every request, also to predict with: it is a decision only where a
        prompt is begun that somebody else will decode.
        """
        starts = [command for command in commands if isinstance(command, StartPrefill)]
        begun = {start.request.id for start in starts if start.until != "end"}
        noted, self._noted = self._noted, {}
        return [choice for choice in noted.values() if choice.subject != "streaming" or choice.request_id in begun]


@dataclass(frozen=True, slots=True)
class TwoRoles:
    """Implements `RolesPolicy`: asks both, and follows the first."""

    policies: Policies
    other: Policies
    choices: Choices

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        """See `RolesPolicy.assign`."""
        theirs = self.other.roles
        other = _said(theirs, lambda: _flips(theirs.assign(cluster, history, cost, now_s), cluster))
        roles = self.policies.roles.assign(cluster, history, cost, now_s)
        _note(self.choices, "roles", (_flips(roles, cluster), other), "nobody flips")
        return roles


@dataclass(frozen=True, slots=True)
class TwoScalings:
    """Implements `ScalingPolicy`: asks both, and follows the first."""

    policies: Policies
    other: Policies
    choices: Choices

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        """See `ScalingPolicy.target`."""
        theirs = self.other.scaling
        other = _said(theirs, lambda: _sizes(theirs.target(cluster, history, cost, now_s), cluster))
        target = self.policies.scaling.target(cluster, history, cost, now_s)
        _note(self.choices, "scaling", (_sizes(target, cluster), other), "as many as there are")
        return target


@dataclass(frozen=True, slots=True)
class TwoMoves:
    """Implements `MovesPolicy`: asks both, and follows the first."""

    policies: Policies
    other: Policies
    choices: Choices

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        """See `MovesPolicy.moves`."""
        theirs = self.other.moves
        other = _said(theirs, lambda: _moves(theirs.moves(cluster, flights, cost, now_s), flights))
        moves = self.policies.moves.moves(cluster, flights, cost, now_s)
        _note(self.choices, "moves", (_moves(moves, flights), other), "nobody moves")
        return moves


@dataclass(slots=True)
class Queue:
    """In which order those that wait for a worker would be served by both: the places that fairness gave them."""

    _keys: dict[RequestId, tuple[tuple[float, ...], tuple[float, ...] | None]] = field(
        default_factory=dict[RequestId, tuple[tuple[float, ...], tuple[float, ...] | None]]
    )
    """Of every request that is not closed, and was taken by the first. None: the other has refused it."""

    def note(
        self, request_id: RequestId, recorded: tuple[float, ...] | CloseRequest, other: tuple[float, ...] | CloseRequest
    ) -> None:
        if not isinstance(recorded, CloseRequest):
            self._keys[request_id] = (recorded, None if isinstance(other, CloseRequest) else other)

    def forget(self, commands: Iterable[CoordinatorCommand]) -> None:
        for command in commands:
            if isinstance(command, CloseRequest):
                self._keys.pop(command.request_id, None)

    def order(self, waiting: Iterable[RequestId]) -> Choice | None:
        """Compare who goes first, of those that both took. None: fewer than two."""
        keys = {name: pair for name in dict.fromkeys(waiting) if (pair := self._keys.get(name)) and pair[1] is not None}
        if len(keys) < 2:
            return None
        recorded = sorted(keys, key=lambda name: (keys[name][0], name))
        other = sorted(keys, key=lambda name: (keys[name][1] or (), name))
        return Choice(
            subject="order",
            request_id=RequestId(""),
            recorded=_list(recorded),
            other=_list(other),
            differs=recorded != other,
        )


def _note(choices: Choices, subject: Decided, answers: tuple[Sequence[str], Sequence[str]], nothing: str) -> None:
    recorded, other = answers
    choices.note(
        Choice(
            subject=subject,
            request_id=RequestId(""),
            recorded=_list(recorded) or nothing,
            other=_list(other) or nothing,
            differs=recorded != other,
        )
    )


def _said(policy: object, ask: Callable[[], Sequence[str]]) -> Sequence[str]:
    answer = asked(policy, ask)
    return [answer.reason] if isinstance(answer, PolicyFailure) else answer


def _flips(roles: Mapping[WorkerId, Role], cluster: ClusterView) -> Sequence[str]:
    known = {worker.id: worker.role for worker in cluster.workers}
    return [f"{worker} to {role}" for worker, role in sorted(roles.items()) if known.get(worker, role) != role]


def _sizes(target: Mapping[Role, int], cluster: ClusterView) -> Sequence[str]:
    live = Counter(worker.role for worker in cluster.workers) + Counter(cluster.starting)
    return [f"{role} {live[role]} to {target[role]}" for role in ROLES if target.get(role, live[role]) != live[role]]


def _moves(moves: Mapping[RequestId, WorkerId], flights: Sequence[FlightView]) -> Sequence[str]:
    where = {flight.request.id: flight.worker for flight in flights}
    return [f"{name} to {worker}" for name, worker in sorted(moves.items()) if where.get(name, worker) != worker]


def _list(names: Sequence[str]) -> str:
    rest = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")
