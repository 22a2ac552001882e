"""Scaling: bounded by the hosts, down to zero and back, and without a lost request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.launching import ScalingRules
from baton.core.messages import (
    AheadEnded,
    CoordinatorCommand,
    PrefillFinished,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RetireWorker,
    SendAhead,
    StartDecode,
    StartPrefill,
    StartWorker,
    StopRequest,
    WorkerJoined,
    WorkerLost,
)
from baton.core.ticking import Tick
from baton.core.types import HostId, LoadWindow, Request, RequestId, Role, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.policy.demand import ForecastScaling
from baton.decide.policy.fleet import ScalingPolicy
from tests.policies import plain_policies
from tests.unit.decide.control.test_reshaping import Wanted

H0, H1 = HostId("h0"), HostId("h1")
P0, D0, D1 = (WorkerId(name) for name in ("p0", "d0", "d1"))
R = RequestId("r")
REQUEST = Request(id=R, prompt_tokens=8, block_hashes=(), output_tokens_max=40, arrived_at_s=0.0)


def coordinator(scaling: ScalingPolicy, *workers: tuple[WorkerId, Role, HostId]) -> Coordinator:
    policies = replace(plain_policies(), scaling=scaling)
    made = Coordinator(policies, block_tokens=4)
    for worker, role, host in workers:
        made.handle(WorkerJoined(WorkerView(id=worker, host=host, role=role)), 0.0)
    return made


def tick(made: Coordinator, now_s: float) -> list[CoordinatorCommand]:
    return made.handle(Tick(LoadWindow(end_s=now_s, window_s=1.0)), now_s)


def decoding(made: Coordinator) -> StartDecode:
    """Let a request arrive and finish its prompt. Return the start of its decode."""
    start = made.handle(RequestArrived(REQUEST), 0.0)[0]
    assert isinstance(start, StartPrefill)
    (decode,) = made.handle(PrefillFinished(R, 1, start.worker, 8), 0.5)
    assert isinstance(decode, StartDecode)
    return decode


def test_no_host_gets_more_workers_than_its_cores_and_memory_can_run() -> None:
    """Before, a policy that wanted 64 workers of a role started all of them on two cores."""
    made = coordinator(Wanted({"prefill": 64, "decode": 2}), (P0, "prefill", H0), (D0, "decode", H0))
    made.open_host(H0, 3)
    made.open_host(H1, 2)
    starts = tick(made, 1.0)
    assert [(start.host, start.role) for start in starts if isinstance(start, StartWorker)] == [
        (H1, "prefill"),
        (H0, "prefill"),
        (H1, "prefill"),
    ]
    assert tick(made, 2.0) == [], "the workers that start take their places"
    made.handle(WorkerLost(starts[0].worker, "no memory"), 3.0)
    (again,) = tick(made, 20.0)
    assert (again.host, again.role) == (H1, "prefill"), "a failed start frees its place"


def test_a_host_that_has_stated_no_limit_has_none() -> None:
    made = coordinator(Wanted({"prefill": 4}), (P0, "prefill", H0))
    made.open_host(H0, None)
    assert [start.host for start in tick(made, 1.0) if isinstance(start, StartWorker)] == ["", "", ""]


def test_scaling_may_start_a_host_for_each_worker() -> None:
    """Their names are known in advance, so that the worker that joins is the one that was asked for."""
    made = coordinator(Wanted({"prefill": 9, "decode": 1}), (P0, "prefill", H0), (D0, "decode", H1))
    made.reshaping.rules = ScalingRules(starts="hosts", hosts_max=4)
    made.open_host(H0, 8)
    starts = [start for start in tick(made, 1.0) if isinstance(start, StartWorker)]
    assert [(start.worker, start.host) for start in starts] == [
        ("prefill-added-1.prefill-0", "prefill-added-1"),
        ("prefill-added-2.prefill-0", "prefill-added-2"),
    ]
    assert tick(made, 2.0) == [], "there is no room for a fifth host"
    made.handle(WorkerJoined(WorkerView(id=starts[0].worker, host=starts[0].host, role="prefill")), 3.0)
    assert made.starting == {"prefill": 1}
    made.handle(WorkerLost(starts[1].worker, "Ray has no room"), 3.0)
    assert tick(made, 4.0) == [], "a failed start delays the next one"
    (again,) = tick(made, 20.0)
    assert isinstance(again, StartWorker)
    assert again.host == "prefill-added-3"


def test_targets_are_only_published_if_another_system_scales() -> None:
    made = coordinator(ForecastScaling(idle_s=10.0), (P0, "prefill", H0), (D0, "decode", H1))
    made.reshaping.rules = ScalingRules(starts="none")
    for now_s in (1.0, 11.0):
        assert tick(made, now_s) == []
    assert made.reshaping.targets == {"prefill": 0, "decode": 0}
    assert made.reshaping.is_asleep
    for number, worker in enumerate((P0, D0)):
        made.handle(WorkerLost(worker, "its pod has ended"), 12.0 + number)
        assert tick(made, 12.5 + number) == []
        assert made.reshaping.is_asleep, "pods end one after the other, which wakes no role"
    assert made.handle(RequestArrived(REQUEST), 14.0) == []
    assert made.reshaping.targets == {"prefill": 1, "decode": 1}, "the request wakes the fleet"
    assert made.reshaping.waits_for_hosts


def test_a_worker_that_comes_back_to_a_sleeping_fleet_does_not_stay_alone() -> None:
    """A launcher has started its lost host again. Before, no target named the other role any more."""
    made = coordinator(ForecastScaling(idle_s=10.0), (P0, "prefill", H0), (D0, "decode", H1))
    tick(made, 1.0)
    assert len(tick(made, 11.0)) == 2
    made.handle(WorkerJoined(WorkerView(id=D1, host=H1, role="decode")), 20.0)
    assert tick(made, 21.0) == [RetireWorker(D1)], "it is as idle as before"
    made.handle(WorkerJoined(WorkerView(id=D1, host=H1, role="decode")), 22.0)
    made.handle(RequestArrived(REQUEST), 22.5)
    (start,) = tick(made, 23.0)
    assert isinstance(start, StartWorker)
    assert start.role == "prefill"


def test_an_idle_fleet_sleeps_and_a_request_wakes_it_at_once() -> None:
    made = coordinator(ForecastScaling(idle_s=10.0), (P0, "prefill", H0), (D0, "decode", H0))
    assert tick(made, 1.0) == []
    assert tick(made, 10.9) == []
    assert tick(made, 11.0) == [RetireWorker(P0), RetireWorker(D0)]
    for worker in (P0, D0):
        made.handle(WorkerLost(worker, "retired"), 11.5)
    assert tick(made, 12.0) == []
    starts = made.handle(RequestArrived(REQUEST), 12.5)
    assert [(type(start), start.role) for start in starts] == [(StartWorker, "prefill"), (StartWorker, "decode")]
    assert made.waiting_since_s == 12.5
    assert tick(made, 13.0) == []
    second = Request(id=RequestId("s"), prompt_tokens=8, block_hashes=(), output_tokens_max=4, arrived_at_s=13.5)
    assert made.handle(RequestArrived(second), 13.5) == [], "the workers that start are enough"
    joined = made.handle(WorkerJoined(WorkerView(id=starts[0].worker, host=H0, role="prefill")), 14.0)
    assert {start.request.id for start in joined} == {R, "s"}


def test_after_a_wake_a_crash_of_all_workers_starts_no_others() -> None:
    """The supervisor restarts them. Before, a policy that had ever been asleep started one more of each role."""
    made = coordinator(ForecastScaling(idle_s=1.0), (P0, "mixed", H0))
    tick(made, 1.0)
    assert tick(made, 2.0) == [RetireWorker(P0)]
    (start,) = made.handle(RequestArrived(REQUEST), 3.0)
    made.handle(WorkerJoined(WorkerView(id=start.worker, host=H0, role="mixed")), 4.0)
    assert tick(made, 5.0) == []
    assert made.handle(WorkerLost(start.worker, "killed"), 6.0) == []
    assert [tick(made, float(second)) for second in range(7, 30)] == [[]] * 23


def test_a_wake_that_failed_is_tried_again_after_a_while() -> None:
    made = coordinator(ForecastScaling(idle_s=1.0), (P0, "mixed", H0))
    tick(made, 1.0)
    assert tick(made, 2.0) == [RetireWorker(P0)]
    (start,) = made.handle(RequestArrived(REQUEST), 3.0)
    made.handle(WorkerLost(start.worker, "no memory"), 4.0)
    assert tick(made, 5.0) == []
    assert [type(command) for command in tick(made, 14.0)] == [StartWorker]


def test_no_fleet_sleeps_beside_a_running_request() -> None:
    made = coordinator(ForecastScaling(idle_s=1.0), (P0, "prefill", H0), (D0, "decode", H0))
    decoding(made)
    assert [tick(made, float(second)) for second in range(1, 20)] == [[]] * 19
    made.handle(RequestFinished(R, 1, D0, "stop", 30), 20.0)
    assert tick(made, 21.0) == []
    assert len(tick(made, 22.0)) == 2


@pytest.mark.parametrize("host", [H0, H1], ids=["same-host", "other-host"])
def test_a_surplus_worker_drains_its_decode_moves_and_then_it_is_retired(host: HostId) -> None:
    """Before, a worker stayed until it was idle by chance, and under load it never was."""
    made = coordinator(Wanted({"decode": 1}), (P0, "prefill", H0), (D0, "decode", H0), (D1, "decode", host))
    assert decoding(made).worker == D0
    other = Request(id=RequestId("s"), prompt_tokens=8, block_hashes=(), output_tokens_max=40, arrived_at_s=0.0)
    made.handle(RequestArrived(other), 0.6)
    (start,) = made.handle(PrefillFinished(other.id, 1, P0, 8), 0.7)
    assert isinstance(start, StartDecode)
    assert start.worker == D1
    commands = tick(made, 1.0)
    if host != H0:
        assert commands == [SendAhead(other, 1, host, D0, report=True)]
        commands = made.handle(AheadEnded(other.id, 1, landed=True), 1.5)
    assert commands == [StopRequest(other.id, 1, D1)]
    assert tick(made, 2.0) == [], "it still has the request"
    (moved,) = made.handle(RequestDropped(other.id, 1, D1, preempted=False), 2.5)
    assert isinstance(moved, StartDecode)
    assert moved.worker == D0
    assert tick(made, 3.0) == [RetireWorker(D1)]


def test_a_draining_worker_serves_again_if_it_is_wanted_again() -> None:
    wanted: dict[Role, int] = {"decode": 1}
    made = coordinator(Wanted(wanted), (P0, "prefill", H0), (D0, "decode", H0), (D1, "decode", H0))
    first = decoding(made)
    other = Request(id=RequestId("s"), prompt_tokens=8, block_hashes=(), output_tokens_max=40, arrived_at_s=0.0)
    made.handle(RequestArrived(other), 0.6)
    made.handle(PrefillFinished(other.id, 1, P0, 8), 0.7)
    (stop,) = tick(made, 1.0)
    assert isinstance(stop, StopRequest)
    wanted["decode"] = 2
    assert tick(made, 2.0) == [], "no worker is started beside one that still runs"
    made.handle(RequestFinished(R, 1, first.worker, "stop", 3), 2.5)
    assert tick(made, 3.0) == []
