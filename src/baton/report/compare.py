"""What other policies would have done with a log: asked the same questions, in the situations that the log had.

The log's own policies go on deciding, so every question is asked in the state that really was. What the other policies
would have made of their own choices (another queue, another cache) is not seen here: that is what simulating is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from baton.control.advice import Policies, PolicyFailure
from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision
from baton.core.messages import CloseRequest
from baton.core.types import ClusterView, HostId, Request, RequestId, WorkerId, WorkerView
from baton.policy.routing import Route
from baton.report.questions import Notes, Question, Subject, WatchedPolicies, families, watched

DIFFERENCES_MAX = 10_000
"""Kept in full; later ones are counted only."""


class Divergence(Struct, frozen=True, kw_only=True):
    """One question that both answer otherwise."""

    at_s: float
    """Since the log's first event."""
    request_id: RequestId
    subject: Subject
    recorded: str
    """The worker, or why there is none."""
    other: str
    recorded_s: float | None
    """Predicted time of the recorded choice: to the first token, or of the next step. None: there is no worker."""
    other_s: float | None


class Comparison(Struct, frozen=True, kw_only=True):
    """The answers of both, counted by kind of question."""

    asked: dict[Subject, int]
    differing: dict[Subject, int]
    recorded_ttft_s: float | None
    """Mean predicted TTFT over all prompts that both gave to a worker."""
    other_ttft_s: float | None
    divergences: tuple[Divergence, ...]
    """The first of them."""
    disagreements: int
    """Events that a replay of the recorded policies decides otherwise than the log: then the rest is doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked(WatchedPolicies):
    """Asks a second set of policies each question, and follows the first."""

    other: WatchedPolicies

    def admit(self, request: Request, cluster: ClusterView, now_s: float) -> tuple[float, ...] | CloseRequest:
        """See `Policies.admit`."""
        self.other.admit(request, cluster, now_s)
        return WatchedPolicies.admit(self, request, cluster, now_s)

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView) -> Route | PolicyFailure:
        """See `Policies.route`."""
        self.other.route(request, candidates, cluster)
        return WatchedPolicies.route(self, request, candidates, cluster)

    def place(
        self, request: Request, source: HostId | None, candidates: Sequence[WorkerView], cluster: ClusterView
    ) -> WorkerId | PolicyFailure:
        """See `Policies.place`."""
        self.other.place(request, source, candidates, cluster)
        return WatchedPolicies.place(self, request, source, candidates, cluster)

    def learn(self, request: Request, output_tokens: int) -> None:
        """See `Policies.learn`."""
        self.other.learn(request, output_tokens)
        WatchedPolicies.learn(self, request, output_tokens)


@dataclass(slots=True)
class _Tally:
    asked: dict[Subject, int] = field(default_factory=dict[Subject, int])
    differing: dict[Subject, int] = field(default_factory=dict[Subject, int])
    divergences: list[Divergence] = field(default_factory=list[Divergence])
    ttft_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def take(self, recorded: Question, other: Question, start_s: float) -> None:
        subject = recorded.subject
        self.asked[subject] = self.asked.get(subject, 0) + 1
        mine, theirs = recorded.option(recorded.chosen), other.option(other.chosen)
        if subject == "prefill" and mine is not None and theirs is not None:
            self.ttft_s.append((mine.predicted_s, theirs.predicted_s))
        same = recorded.chosen == other.chosen and bool(recorded.refusal) == bool(other.refusal)
        if same:
            return
        self.differing[subject] = self.differing.get(subject, 0) + 1
        if len(self.divergences) < DIFFERENCES_MAX:
            self.divergences.append(
                Divergence(
                    at_s=recorded.at_s - start_s,
                    request_id=recorded.request_id,
                    subject=subject,
                    recorded=_answer(recorded),
                    other=_answer(other),
                    recorded_s=None if mine is None else mine.predicted_s,
                    other_s=None if theirs is None else theirs.predicted_s,
                )
            )


def compare(coordinator: Coordinator, decisions: Iterable[Decision], other: Policies) -> Comparison:
    """Replay a log into a fresh coordinator with its own policies, and ask `other` whatever they are asked."""
    notes, theirs = Notes(), Notes()
    coordinator.policies = _Asked(**families(coordinator.policies), notes=notes, other=watched(other, theirs))
    tally = _Tally()
    disagreements, start_s = 0, None
    for decision in decisions:
        start_s = decision.now_s if start_s is None else start_s
        notes.now_s = theirs.now_s = decision.now_s
        disagreements += tuple(coordinator.handle(decision.event, decision.now_s)) != decision.commands
        for recorded, answered in zip(notes.questions, theirs.questions, strict=True):
            tally.take(recorded, answered, start_s)
        notes.questions.clear()
        theirs.questions.clear()
    return Comparison(
        asked=tally.asked,
        differing=tally.differing,
        recorded_ttft_s=_mean([mine for mine, _ in tally.ttft_s]),
        other_ttft_s=_mean([theirs_s for _, theirs_s in tally.ttft_s]),
        divergences=tuple(tally.divergences),
        disagreements=disagreements,
    )


def _answer(question: Question) -> str:
    if question.refusal:
        return f"refused: {question.refusal}"
    return question.chosen or "taken"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
