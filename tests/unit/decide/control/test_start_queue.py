"""The queue's deadline: nothing waits beyond it, and a request that would is refused at its arrival."""

from __future__ import annotations

import msgspec
import pytest

from baton.core.messages import (
    BlocksWanted,
    CloseRequest,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import QueuedTooLong
from baton.core.types import HostId, Request, RequestId, Slo, WorkerId, WorkerView
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import HostAdded, WorkerSaid
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.flight import Flight
from baton.decide.control.host_pools import PoolRules
from baton.decide.control.start_queue import STARTS_MAX, StartQueue
from baton.decide.kv.layout import KVLayout
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.policies import plain_policies

HOST, W = HostId("h"), WorkerId("w")
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")


def request(name: str, slo: Slo | None = None) -> Request:
    return Request(id=RequestId(name), prompt_tokens=4, output_tokens_max=4, arrived_at_s=0.0, slo=slo)


def cluster(wait_s_max: float | None = 10.0) -> Cluster:
    """One mixed worker on one host."""
    made = Cluster(
        Coordinator(plain_policies(), block_tokens=4, queue=StartQueue(wait_s_max)),
        PoolRules(eviction=LeastRecentlyUsed),
    )
    made.handle(HostAdded(HOST, 64, LAYOUT), 0.0)
    made.handle(WorkerJoined(WorkerView(id=W, host=HOST, role="mixed")), 0.0)
    return made


def closed(commands: list) -> dict[str, CloseRequest]:
    return {command.request_id: command for command in commands if isinstance(command, CloseRequest)}


def test_a_request_that_gets_no_step_is_rejected_at_its_deadline() -> None:
    made = cluster()
    made.handle(RequestArrived(request("a")), 1.0)
    made.handle(RequestArrived(request("b")), 2.0)
    queue = made.coordinator.queue
    assert queue.deadline_s == 11.0
    assert closed(made.handle(QueuedTooLong(), 10.9)) == {}
    made.handle(QueuedTooLong(), 11.0)
    decided = made.decided
    assert StopRequest(RequestId("a"), 1, W) in decided
    assert ReleaseBlocks(RequestId("a")) in decided
    (close,) = [command for command in decided if isinstance(command, CloseRequest)]
    assert (close.request_id, close.outcome, close.reject) == ("a", "rejected", "queue_deadline")
    assert "waited for 10 s without a step" in close.reason
    assert "limits.queue_s" in close.reason
    assert queue.deadline_s == 12.0
    assert made.coordinator.live_requests == 1


def granted() -> Cluster:
    """A cluster whose worker has blocks for request `a` since t = 2 s. The request arrived at t = 1 s."""
    made = cluster()
    made.handle(RequestArrived(request("a")), 1.0)
    made.handle(WorkerSaid(W, events=(BlocksWanted(RequestId("a"), 1, W, 2),)), 2.0)
    return made


def test_a_request_with_blocks_is_rejected_once_its_worker_has_dropped_it_before_a_step() -> None:
    made = granted()
    assert made.coordinator.queue.deadline_s == 11.0
    made.handle(QueuedTooLong(), 11.0)
    assert made.decided == [
        StopRequest(RequestId("a"), 1, W, only_unstarted=True),
        ToWorker(W, StopRequest(RequestId("a"), 1, W, only_unstarted=True)),
    ]
    close = closed(made.handle(WorkerSaid(W, events=(dropped(),)), 11.5))["a"]
    assert (close.outcome, close.reject) == ("rejected", "queue_deadline")
    assert made.coordinator.live_requests == 0
    assert made.pools[HOST].view().blocks_used == 0


def test_a_request_that_was_in_a_step_may_take_as_long_as_it_needs() -> None:
    """Its worker does not answer. The deadline passes once only."""
    made = granted()
    made.handle(QueuedTooLong(), 11.0)
    assert made.coordinator.queue.deadline_s is None
    made.handle(WorkerSaid(W, begun=((RequestId("a"), 1),)), 12.0)
    assert closed(made.handle(WorkerSaid(W, events=(dropped(),)), 13.0)) == {}, "a drop for another reason"


def test_a_first_token_ends_the_wait() -> None:
    made = granted()
    made.handle(WorkerSaid(W, begun=((RequestId("a"), 1),)), 3.0)
    assert made.coordinator.queue.deadline_s is None


def test_a_request_that_comes_with_its_blocks_waits_for_a_step_too() -> None:
    queue = StartQueue(10.0)
    queue.enter(request("a"), 1.0, has_blocks=True)
    assert queue.deadline_s == 11.0
    assert queue.refuse(request("b"), 9.0) is None, "no request waits for blocks"
    flights = {RequestId("a"): Flight(request("a"), worker=W)}
    assert queue.stop_overdue(10.9, flights) == []
    assert queue.stop_overdue(11.0, flights) == [StopRequest(RequestId("a"), 1, W, only_unstarted=True)]


def dropped() -> RequestDropped:
    return RequestDropped(RequestId("a"), 1, W, preempted=False)


@pytest.mark.parametrize("event", [RequestCancelled(RequestId("a")), WorkerLost(W, "killed")])
def test_an_ended_request_and_one_without_a_worker_leave_the_queue(event: RequestCancelled | WorkerLost) -> None:
    """Without a worker another deadline holds, and a second attempt has none: its client may have text."""
    made = cluster()
    made.handle(RequestArrived(request("a")), 1.0)
    made.handle(event, 2.0)
    assert made.coordinator.queue.deadline_s is None
    made.handle(WorkerJoined(WorkerView(id=W, host=HOST, role="mixed")), 3.0)
    assert made.coordinator.queue.deadline_s is None


def test_a_request_that_may_wait_one_with_an_slo_and_a_queue_without_a_deadline_reject_nothing() -> None:
    made = cluster()
    made.handle(RequestArrived(request("a", Slo(ttft_s=10.0, tpot_s=1.0))), 1.0)
    assert made.coordinator.queue.deadline_s is None
    made.handle(RequestArrived(msgspec.structs.replace(request("b"), may_wait=True)), 1.0)
    assert made.coordinator.queue.deadline_s is None
    endless = cluster(None)
    endless.handle(RequestArrived(request("a")), 1.0)
    assert endless.coordinator.queue.deadline_s is None
    assert closed(endless.handle(QueuedTooLong(), 999.0)) == {}


def test_an_slo_that_allows_a_longer_wait_keeps_the_deadline_and_the_refusal() -> None:
    """Any client may send one. With a TPOT only, the TTFT is one that cannot be missed."""
    loose = Slo(ttft_s=86_400.0, tpot_s=1.0)
    made = cluster()
    made.handle(RequestArrived(request("a", loose)), 1.0)
    assert made.coordinator.queue.deadline_s == 11.0
    close = overloaded().refuse(request("new", loose), 20.0)
    assert close is not None
    assert close.reject == "queue_deadline"
    assert overloaded().refuse(request("new", Slo(ttft_s=10.0, tpot_s=1.0)), 20.0) is None


def overloaded() -> StartQueue:
    """Two requests a second arrive and one starts, for 20 s: 20 are left."""
    queue = StartQueue(10.0)
    for number in range(40):
        queue.enter(request(f"r{number}"), number / 2)
        if number % 2:
            queue.start(RequestId(f"r{number // 2}"), number / 2)
    return queue


def test_an_overloaded_queue_refuses_at_the_door_with_the_time_to_come_again() -> None:
    """20 wait at about one start a second: a new one would wait for 21 s, and 5 are accepted."""
    assert overloaded().refuse(msgspec.structs.replace(request("part"), may_wait=True), 20.0) is None
    close = overloaded().refuse(request("new"), 20.0)
    assert close is not None
    assert (close.outcome, close.reject) == ("rejected", "queue_deadline")
    assert "would wait for 21.0 s" in close.reason
    assert close.retry_after_s == pytest.approx(21.0 - 5.0)


def test_the_coordinator_refuses_at_the_door() -> None:
    made = cluster()
    queue = made.coordinator.queue
    for number in range(40):
        queue.enter(request(f"r{number}"), number / 2)
        if number % 2:
            queue.start(RequestId(f"r{number // 2}"), number / 2)
    assert closed(made.handle(RequestArrived(request("new")), 20.0))["new"].reject == "queue_deadline"
    assert made.coordinator.live_requests == 0


def test_a_burst_at_an_idle_server_is_no_overload() -> None:
    """Hundreds at once wait for a moment; nothing is known about the rate, or nobody has waited for long."""
    queue = StartQueue(10.0)
    for number in range(200):
        assert queue.refuse(request(f"r{number}"), 0.001 * number) is None
        queue.enter(request(f"r{number}"), 0.001 * number)
    assert queue.refuse(request("new"), 5.0) is None, "no request has started: nothing is predicted"
    for number in range(STARTS_MAX):
        queue.start(RequestId(f"r{number}"), 0.2 + 0.001 * number)
    assert queue.refuse(request("new"), 0.3) is None


def test_a_queue_that_was_empty_forgets_its_rate() -> None:
    """Starts of an hour ago say nothing about now."""
    queue = overloaded()
    for number in range(40):
        queue.start(RequestId(f"r{number}"), 30.0)
    queue.enter(request("late"), 3600.0)
    assert queue.refuse(request("new"), 3604.0) is None


def test_a_deferred_request_does_not_hide_the_earlier_deadline_of_a_newer_one() -> None:
    queue = StartQueue(10.0)
    queue.enter(msgspec.structs.replace(request("deferred"), deferred_s=60.0), 0.0)
    check_s = queue.next_check_s(0.0)
    assert check_s is not None
    queue.enter(request("a"), 0.0)
    while check_s < 10.0:
        assert not queue.is_overdue(check_s)
        check_s = queue.next_check_s(check_s) or 60.0
    assert check_s == 10.0
    assert [close.request_id for close in queue.reject_overdue(check_s)] == ["a"]
