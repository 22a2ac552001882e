"""Other policies are asked the same, and nothing that they answer is followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from baton.control.advice import Policies
from baton.core.messages import RequestArrived
from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, WorkerId, WorkerView
from baton.policy.admission import Reject
from baton.report.compare import compare
from tests.unit.report.logs import D1, FLEET, P0, P1, fresh, log_of, request


@dataclass(frozen=True, slots=True)
class Always:
    """One worker, whoever asks."""

    worker: WorkerId

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        return self.worker


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
    assert found.asked == {"admit": 3, "prefill": 2, "decode": 5}, "one prompt is sent ahead, and asked about twice"
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
    assert [divergence.other for divergence in found.divergences] == ["d1", "d1"]
    assert all(divergence.other_s for divergence in found.divergences)


def test_the_answers_of_the_other_are_not_followed(policies: Policies) -> None:
    """Ten prompts at once: the log spreads them over two workers, and goes on doing so while the other is asked."""
    events = [*FLEET, *((11.0, RequestArrived(request(f"r{index}"))) for index in range(10))]
    found = compare(fresh(), log_of(events), replace(policies, routing=Always(P0)))
    assert found.disagreements == 0
    assert found.differing == {"prefill": 5}
