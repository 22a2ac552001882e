"""A rolling restart: one worker at a time, no request is lost, and no death is counted."""

from __future__ import annotations

from baton.core.leaving import RestartWanted, RestartWorker
from baton.core.messages import (
    CloseRequest,
    CoordinatorCommand,
    DecodeBegun,
    HostLost,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import Tick
from baton.core.types import HostId, LoadWindow, Request, RequestId, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.retries import Retries, RetryRules
from tests.policies import plain_policies

A, B, C = (WorkerId(name) for name in "abc")
R = RequestId("r")
TICK = Tick(LoadWindow(end_s=1.0, window_s=1.0))


def view(worker: WorkerId, host: str = "h") -> WorkerView:
    return WorkerView(id=worker, host=HostId(host), role="mixed")


def cluster(*workers: WorkerView) -> Coordinator:
    made = Coordinator(plain_policies(), block_tokens=4, retries=Retries(RetryRules(attempts_max=1, per_minute=0)))
    for worker in workers:
        made.handle(WorkerJoined(worker), 0.0)
    return made


def request(name: str) -> Request:
    return Request(id=RequestId(name), prompt_tokens=8, output_tokens_max=8, arrived_at_s=0.0)


def restarts(commands: list[CoordinatorCommand]) -> list[WorkerId]:
    return [command.worker for command in commands if isinstance(command, RestartWorker)]


def back(made: Coordinator, worker: WorkerId) -> list[WorkerId]:
    """Let a worker end and join again. Return the workers that restart next."""
    assert made.handle(WorkerLost(worker, "it restarts"), 1.0) == []
    return restarts(made.handle(WorkerJoined(view(worker)), 1.0))


def test_idle_workers_restart_one_after_the_other() -> None:
    made = cluster(view(A), view(B), view(C))
    assert restarts(made.handle(RestartWanted((A, B, C)), 0.0)) == [A]
    assert made.moves.rolling.workers == (A, B, C)
    assert [back(made, worker) for worker in (A, B, C)] == [[B], [C], []]
    assert made.moves.rolling.workers == ()


def test_a_decode_moves_away_before_its_worker_restarts_and_new_requests_go_elsewhere() -> None:
    made = cluster(view(A), view(B))
    (start,) = made.handle(RequestArrived(request("r")), 0.0)
    assert isinstance(start, StartPrefill)
    busy, other = start.worker, {A: B, B: A}[start.worker]
    made.handle(DecodeBegun(R, 1, busy), 0.0)
    assert made.handle(RestartWanted((busy,)), 0.0) == []
    assert [start.worker for start in made.handle(RequestArrived(request("new")), 0.0)] == [other]
    assert made.handle(TICK, 0.0) == [StopRequest(R, 1, busy)]
    (moved,) = made.handle(RequestDropped(R, 1, busy, preempted=False), 0.0)
    assert isinstance(moved, StartDecode)
    assert (moved.worker, moved.attempt) == (other, 2)
    assert made.handle(TICK, 0.0) == [RestartWorker(busy)]
    assert back(made, busy) == []


def test_the_requests_of_a_lone_worker_wait_for_it_and_its_end_is_no_death() -> None:
    """One death would fail the request here and refuse its prompt, and there is no budget of retries."""
    made = cluster(view(A))
    made.handle(RequestArrived(request("r")), 0.0)
    made.handle(DecodeBegun(R, 1, A), 0.0)
    assert made.handle(RestartWanted((A,)), 0.0) == [RestartWorker(A)]
    assert made.handle(WorkerLost(A, "it restarts"), 1.0) == []
    (again,) = made.handle(WorkerJoined(view(A)), 2.0)
    assert (again.worker, again.attempt) == (A, 2)
    assert any(isinstance(each, CloseRequest) for each in made.handle(RequestFinished(R, 2, A, "length"), 3.0))


def test_a_worker_that_dies_while_it_drains_counts_as_dead_and_the_next_one_waits_for_it() -> None:
    made = cluster(view(A), view(B))
    (start,) = made.handle(RequestArrived(request("r")), 0.0)
    busy, other = start.worker, {A: B, B: A}[start.worker]
    made.handle(RestartWanted((busy, other)), 0.0)
    (close,) = [each for each in made.handle(WorkerLost(busy, "killed"), 1.0) if isinstance(each, CloseRequest)]
    assert close.outcome == "failed"
    assert restarts(made.handle(TICK, 1.0)) == []
    assert restarts(made.handle(WorkerJoined(view(busy)), 2.0)) == [other]


def test_the_loss_of_a_host_does_not_end_the_rolling_restart() -> None:
    made = cluster(view(A, "one"), view(B, "two"), view(C, "two"))
    assert restarts(made.handle(RestartWanted((A, B)), 0.0)) == [A]
    made.handle(WorkerLost(A, "it restarts"), 1.0)
    made.handle(HostLost(HostId("one"), "cut"), 1.0)
    assert made.needs_ticks
    assert restarts(made.handle(TICK, 2.0)) == [B]


def test_a_new_wish_replaces_one_whose_worker_never_comes_back() -> None:
    made = cluster(view(A), view(B))
    assert restarts(made.handle(RestartWanted((A, B)), 0.0)) == [A]
    made.handle(WorkerLost(A, "it restarts"), 1.0)
    made.handle(RestartWanted(()), 2.0)
    assert made.moves.rolling.workers == ()
    assert made.handle(RestartWanted((B, WorkerId("unknown"))), 3.0) == [RestartWorker(B)]
