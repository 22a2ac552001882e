"""A failing fleet repeats a bounded share of its work, and says so to the clients of the rest."""

from __future__ import annotations

import pytest

from baton.core.messages import CloseRequest, HostLost, RequestArrived, StartPrefill, WorkerJoined, WorkerLost
from baton.core.types import HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.flight import Flight
from baton.decide.control.retries import Retries, RetryRules
from tests.policies import plain_policies

R, W = RequestId("r"), WorkerId("w")


def refusal(budget: Retries, now_s: float, death: str = "killed") -> CloseRequest | None:
    """Let a request lose its first worker."""
    request = Request(id=R, prompt_tokens=8, output_tokens_max=8, arrived_at_s=0.0)
    return budget.refuse(Flight(request), death, now_s, is_alone=False)


def spent(budget: Retries, count: int, now_s: float) -> list[bool]:
    return [refusal(budget, now_s) is None for _ in range(count)]


def test_time_and_admitted_requests_refill_the_budget_up_to_its_size() -> None:
    budget = Retries(RetryRules(per_minute=3, ratio=0.5))
    assert spent(budget, 4, 0.0) == [True, True, True, False]
    assert spent(budget, 2, 20.0) == [True, False], "a third of a minute"
    for _ in range(2):
        budget.admitted()
    assert spent(budget, 2, 20.0) == [True, False]
    for _ in range(100):
        budget.admitted()
    assert spent(budget, 5, 1e6) == [True, True, True, False, False]


def test_a_refusal_names_the_cause_both_settings_and_the_time() -> None:
    budget = Retries(RetryRules(per_minute=6, ratio=0.25))
    assert all(spent(budget, 6, 0.0))
    end = refusal(budget, 0.0, "killed by signal 9")
    assert end is not None
    assert (end.outcome, end.reject, end.retry_after_s) == ("rejected", "retries", pytest.approx(10.0))
    for part in ("killed by signal 9", "6 a minute", "survival.retries_per_minute", "0.25", "survival.retry_ratio"):
        assert part in end.reason


def test_a_budget_of_nothing_allows_no_retry() -> None:
    budget = Retries(RetryRules(per_minute=0, ratio=1.0))
    budget.admitted()
    assert spent(budget, 1, 1e9) == [False]


def coordinator(per_minute: int) -> Coordinator:
    rules = RetryRules(attempts_max=100, per_minute=per_minute, ratio=0.0)
    return Coordinator(plain_policies(), block_tokens=4, retries=Retries(rules))


@pytest.mark.parametrize("is_host", [False, True])
def test_requests_beyond_the_budget_are_rejected_when_a_worker_or_host_is_lost(is_host: bool) -> None:
    """Each request is closed once: the oldest ones are tried again."""
    made = coordinator(per_minute=2)
    view = WorkerView(id=W, host=HostId("h"), role="mixed")
    made.handle(WorkerJoined(view), 0.0)
    for number in range(5):
        request = Request(id=RequestId(f"r{number}"), prompt_tokens=8, output_tokens_max=8, arrived_at_s=0.0)
        made.handle(RequestArrived(request), 0.0)
    commands = made.handle(HostLost(HostId("h"), "cut") if is_host else WorkerLost(W, "killed"), 1.0)
    closed = [command for command in commands if isinstance(command, CloseRequest)]
    assert [(close.request_id, close.outcome, close.reject) for close in closed] == [
        (f"r{number}", "rejected", "retries") for number in (2, 3, 4)
    ]
    started = [command for command in made.handle(WorkerJoined(view), 2.0) if isinstance(command, StartPrefill)]
    assert [(start.request.id, start.attempt) for start in started] == [("r0", 2), ("r1", 2)]
    assert made.live_requests == 2
