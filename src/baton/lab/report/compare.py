"""What other policies would have done with a log: asked the same questions, in the situations that the log had.

The log's own policies go on deciding, so every question is asked in the state that really was. What the other policies
would have made of their own choices (another queue, another cache) is not seen here: that is what simulating is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from msgspec import Struct, structs

from baton.core.messages import CloseRequest, WorkerJoined
from baton.core.ticking import Tick
from baton.core.types import ClusterView, HostId, Request, RequestId, Until, WorkerId, WorkerView
from baton.core.ways import HandoffView, Way
from baton.decide.control.advice import Policies, PolicyFailure
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.decision_log import Decision
from baton.decide.policy.handoff import central_s
from baton.decide.policy.routing import Route
from baton.lab.report.choices import Choice, Choices, Decided, Queue, TwoMoves, TwoRoles, TwoScalings
from baton.lab.report.questions import Notes, Question, Subject, WatchedPolicies, families, watched

SUBJECTS: dict[Subject, Decided] = {"admit": "admit", "prefill": "prefill", "decode": "decode", "move": "moves"}
DIFFERENCES_MAX = 10_000
"""Kept in full; later ones are counted only."""


class Divergence(Struct, frozen=True, kw_only=True):
    """One question that both answer otherwise."""

    at_s: float
    """Since the log's first event."""
    request_id: RequestId
    """Empty: it is about the fleet."""
    subject: Decided
    recorded: str
    """The answer: a worker, or why there is none."""
    other: str
    recorded_s: float | None
    """Predicted time of the recorded answer: to the first token, of the next step, of a way. None: nothing is."""
    other_s: float | None


class Comparison(Struct, frozen=True, kw_only=True):
    """The answers of both, counted by kind of question."""

    asked: dict[Decided, int]
    """Every kind, those too that nobody was asked."""
    differing: dict[Decided, int]
    recorded_ttft_s: float | None
    """Mean predicted TTFT over all prompts that both gave to a worker."""
    other_ttft_s: float | None
    divergences: tuple[Divergence, ...]
    """The first of them."""
    disagreements: int
    """Events that a replay of the recorded policies decides otherwise than the log: then the rest is doubtful."""
    ticks: int
    """Roles, scaling and moves are asked at these. A log has none where its own policies change no fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked(WatchedPolicies):
    """Asks a second set of policies each question, and follows the first."""

    other: WatchedPolicies
    choices: Choices
    queue: Queue

    def admit(self, request: Request, cluster: ClusterView, now_s: float) -> tuple[float, ...] | CloseRequest:
        """See `Policies.admit`."""
        other = self.other.admit(request, _seen_by(self.other, request, cluster), now_s)
        answer = WatchedPolicies.admit(self, request, cluster, now_s)
        self.queue.note(request.id, answer, other)
        return answer

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView) -> Route | PolicyFailure:
        """See `Policies.route`."""
        self.other.route(request, candidates, _seen_by(self.other, request, cluster))
        return WatchedPolicies.route(self, request, candidates, cluster)

    def place(
        self, request: Request, source: HostId | None, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> WorkerId | PolicyFailure:
        """See `Policies.place`."""
        self.other.place(request, source, candidates, _seen_by(self.other, request, cluster))
        return WatchedPolicies.place(self, request, source, candidates, cluster)

    def until(self, request: Request, until: Until) -> Until:
        """See `Policies.until`."""
        answer = WatchedPolicies.until(self, request, until)
        if until == "first_token":
            who = {"first_token": "prefill", "prompt": "decode"}
            self.choices.said("first_token", request.id, who[answer], who[self.other.until(request, until)])
        return answer

    def run_tokens(self, request: Request) -> int:
        """See `Policies.run_tokens`."""
        other, answer = self.other.run_tokens(request), WatchedPolicies.run_tokens(self, request)
        self.choices.said("streaming", request.id, _runs(answer), _runs(other))
        return answer

    def layer_groups(self, request: Request, worker: WorkerView) -> int:
        """See `Policies.layer_groups`."""
        other, answer = self.other.layer_groups(request, worker), WatchedPolicies.layer_groups(self, request, worker)
        self.choices.said("layers", request.id, str(answer), str(other))
        return answer

    def way(self, handoff: HandoffView) -> Way:
        """See `Policies.way`."""
        other, answer = self.other.way(handoff), WatchedPolicies.way(self, handoff)
        took_s: dict[Way, float] = {"direct": handoff.direct.expected_s, "central": central_s(handoff)}
        self.choices.said("way", handoff.request.id, answer, other, (took_s[answer], took_s[other]))
        return answer

    def learn(self, request: Request, output_tokens: int) -> None:
        """See `Policies.learn`."""
        self.other.learn(request, output_tokens)
        WatchedPolicies.learn(self, request, output_tokens)


def _seen_by(policies: Policies, request: Request, cluster: ClusterView) -> ClusterView:
    """The cluster as these policies would see it: what is predicted of a request comes from families of their own."""
    return structs.replace(
        cluster,
        expected_output_tokens=policies.expected_tokens(request),
        first_token_by=policies.first_token_by(request),
        is_sent_ahead=policies.run_tokens(request) > 0,
    )


def _runs(tokens: int) -> str:
    return f"in runs of {tokens} tokens" if tokens > 0 else "when it is computed"


def _both(policies: Policies, other: Policies, notes: Notes, theirs: Notes, choices: Choices, queue: Queue) -> _Asked:
    """Make policies that ask both sets whatever they are asked."""
    restless = {
        "roles": TwoRoles(policies, other, choices),
        "scaling": TwoScalings(policies, other, choices),
        "moves": TwoMoves(policies, other, choices),
    }
    own: dict[str, Any] = families(policies) | restless
    return _Asked(**own, notes=notes, other=watched(other, theirs), choices=choices, queue=queue)


@dataclass(slots=True)
class _Tally:
    asked: dict[Decided, int] = field(default_factory=lambda: dict.fromkeys(get_args(Decided), 0))
    differing: dict[Decided, int] = field(default_factory=dict[Decided, int])
    divergences: list[Divergence] = field(default_factory=list[Divergence])
    ttft_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def question(self, recorded: Question, other: Question, at_s: float) -> None:
        """Count a question about a worker for a request."""
        mine, theirs = recorded.option(recorded.chosen), other.option(other.chosen)
        if recorded.subject == "prefill" and mine is not None and theirs is not None:
            self.ttft_s.append((mine.predicted_s, theirs.predicted_s))
        choice = Choice(
            subject=SUBJECTS[recorded.subject],
            request_id=recorded.request_id,
            recorded=_answer(recorded, other),
            other=_answer(other, recorded),
            differs=_chosen(recorded) != _chosen(other),
            recorded_s=None if mine is None else mine.predicted_s,
            other_s=None if theirs is None else theirs.predicted_s,
        )
        self.choice(choice, at_s)

    def choice(self, choice: Choice, at_s: float) -> None:
        """Count any question."""
        self.asked[choice.subject] += 1
        if not choice.differs:
            return
        self.differing[choice.subject] = self.differing.get(choice.subject, 0) + 1
        if len(self.divergences) < DIFFERENCES_MAX:
            self.divergences.append(
                Divergence(
                    at_s=at_s,
                    request_id=choice.request_id,
                    subject=choice.subject,
                    recorded=choice.recorded,
                    other=choice.other,
                    recorded_s=choice.recorded_s,
                    other_s=choice.other_s,
                )
            )


def compare(coordinator: Coordinator, decisions: Iterable[Decision], other: Policies) -> Comparison:
    """Replay a log into a fresh coordinator with its own policies, and ask `other` whatever they are asked."""
    notes, theirs, choices, queue = Notes(), Notes(), Choices(), Queue()
    coordinator.policies = _both(coordinator.policies, other, notes, theirs, choices, queue)
    tally = _Tally()
    disagreements, ticks, start_s = 0, 0, None
    for decision in decisions:
        start_s = decision.now_s if start_s is None else start_s
        notes.now_s = theirs.now_s = decision.now_s
        ticks += isinstance(decision.event, Tick)
        commands = coordinator.handle(decision.event, decision.now_s)
        disagreements += tuple(commands) != decision.commands
        at_s = decision.now_s - start_s
        for recorded, answered in zip(notes.questions, theirs.questions, strict=True):
            tally.question(recorded, answered, at_s)
        waiting = [question.request_id for question in notes.questions]
        order = queue.order(waiting) if isinstance(decision.event, WorkerJoined) else None
        for choice in [*choices.taken(commands), *([order] if order is not None else [])]:
            tally.choice(choice, at_s)
        queue.forget(commands)
        notes.questions.clear()
        theirs.questions.clear()
    return Comparison(
        asked=tally.asked,
        differing=tally.differing,
        recorded_ttft_s=_mean([mine for mine, _ in tally.ttft_s]),
        other_ttft_s=_mean([theirs_s for _, theirs_s in tally.ttft_s]),
        divergences=tuple(tally.divergences),
        disagreements=disagreements,
        ticks=ticks,
    )


def _chosen(question: Question) -> tuple[object, ...]:
    """What has to be the same in two answers. Words of a refusal need not be."""
    return (question.chosen, bool(question.refusal), question.fetch, question.until)


def _answer(question: Question, beside: Question) -> str:
    """The answer in words; with how it goes on, where that is not the same in the answer beside it."""
    if question.refusal:
        return f"refused: {question.refusal}"
    said = question.chosen or "taken"
    if question.fetch != beside.fetch:
        said += f", with the prefix of {question.fetch}" if question.fetch else ", with its own prefix"
    if question.until != beside.until and question.until is not None and beside.until is not None:
        said += {"prompt": ", to the last prompt token", "first_token": ", to the first token", "end": ", to its end"}[
            question.until
        ]
    return said


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
