"""Other policies are asked the same, and nothing that they answer is followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from baton.core.messages import RequestArrived
from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, WorkerId, WorkerView
from baton.decide.control.advice import Policies
from baton.decide.policy.admission import Reject
from baton.decide.policy.routing import Route
from baton.lab.report.compare import compare
from tests.unit.lab.report.logs import D1, FLEET, NEAR, P0, P1, fresh, log_of, request


@dataclass(frozen=True, slots=True)
class Always:
    """One worker, whoever asks."""

    worker: WorkerId

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        return self.worker


@dataclass(frozen=True, slots=True)
class ToTheEnd:
    """One worker does all of it, with a prefix that its own host has as well."""

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        return Route(worker=P0, fetch=NEAR, until="end")


@dataclass(frozen=True, slots=True)
class Closed:
    def admit(self, request: Request, cluster: ClusterView, cost: CostModel, now_s: float) -> Reject | None:
        return Reject(reject="share", reason="closed today", retry_after_s=1.0)


@pytest.fixture
def policies() -> Policies:
    """Those of the log, made anew."""
    return fresh().policies


def test_the_same_policies_answer_the_same(policies: Policies) -> None:
    found = compare(fresh(), log_of(), policies)
    assert (found.differing, found.divergences, found.disagreements) == ({}, (), 0)
    asked = {subject: times for subject, times in found.asked.items() if times}
    assert asked == {"admit": 3, "prefill": 2, "decode": 5, "first_token": 2, "streaming": 2}
    assert found.recorded_ttft_s == found.other_ttft_s


def test_another_route_shows_both_predictions(policies: Policies) -> None:
    """p1 is idle but has no prefix: later for the one that was asked, the same for the first."""
    found = compare(fresh(), log_of(), replace(policies, routing=Always(P1)))
    assert (found.differing, found.disagreements) == ({"prefill": 2}, 0)
    busy, asked = found.divergences
    assert [(d.request_id, d.recorded, d.other, d.at_s) for d in (busy, asked)] == [
        ("busy", "p0", "p1", 1.0),
        ("asked", "p0", "p1", 2.0),
    ]
    assert busy.recorded_s == busy.other_s
    assert asked.recorded_s is not None
    assert asked.other_s is not None
    assert asked.recorded_s < asked.other_s
    assert found.other_ttft_s is not None
    assert found.other_ttft_s > (found.recorded_ttft_s or 0)


def test_a_refusal_is_told_in_words(policies: Policies) -> None:
    """The one that both refuse, for different reasons, is no difference."""
    found = compare(fresh(), log_of(), replace(policies, admission=Closed()))
    assert found.differing == {"admit": 2}
    assert {(d.recorded, d.other) for d in found.divergences} == {("taken", "refused: closed today")}


def test_a_choice_that_is_not_there_is_an_answer_too(policies: Policies) -> None:
    found = compare(fresh(), log_of(), replace(policies, routing=Always(WorkerId("gone"))))
    assert all("chose 'gone'" in divergence.other for divergence in found.divergences)
    assert {divergence.other_s for divergence in found.divergences} == {None}


def test_a_worker_of_another_role_may_be_chosen_and_has_its_prediction(policies: Policies) -> None:
    """A decode worker that shall compute the prompt is no candidate, and still a worker."""
    found = compare(fresh(), log_of(), replace(policies, routing=Always(D1)))
    assert [divergence.other for divergence in found.divergences] == ["d1, to its end", "d1, to its end"]
    assert all(divergence.other_s for divergence in found.divergences)


@dataclass(frozen=True, slots=True)
class LastFirst:
    """Whoever has the later name goes first."""

    version: int = 0

    def key(self, request: Request) -> tuple[float, ...]:
        return (-float(ord(request.id[0])),)

    def joined(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...

    def served(self, request: Request, tokens: int) -> None: ...


def test_who_goes_first_of_those_that_wait_is_compared(policies: Policies) -> None:
    """Three arrive before any worker is there; the one that the other refuses is in neither queue."""
    waiting = [(1.0, RequestArrived(request(name))) for name in ("a", "b", "c")]
    found = compare(fresh(), log_of([*waiting, *FLEET]), replace(policies, fairness=LastFirst()))
    assert (found.asked["order"], found.differing) == (1, {"order": 1})
    assert [(d.recorded, d.other, d.request_id) for d in found.divergences] == [("a, b, c", "c, b, a", "")]
    refused = compare(fresh(), log_of([*waiting, *FLEET]), replace(policies, admission=Closed()))
    assert refused.asked["order"] == 0


def test_a_route_that_goes_on_otherwise_is_another_answer(policies: Policies) -> None:
    """The same worker, that computes to the end; what it would pull is no longer than what it has."""
    found = compare(fresh(), log_of(), replace(policies, routing=ToTheEnd()))
    assert {(d.subject, d.recorded, d.other) for d in found.divergences if d.subject == "prefill"} == {
        ("prefill", "p0, to the first token", "p0, to its end")
    }


def test_the_answers_of_the_other_are_not_followed(policies: Policies) -> None:
    """Ten prompts at once: the log spreads them over two workers, and goes on doing so while the other is asked."""
    events = [*FLEET, *((11.0, RequestArrived(request(f"r{index}"))) for index in range(10))]
    found = compare(fresh(), log_of(events), replace(policies, routing=Always(P0)))
    assert found.disagreements == 0
    assert found.differing == {"prefill": 5}
