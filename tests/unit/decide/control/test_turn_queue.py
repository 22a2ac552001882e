"""The fair queue of the coordinator: whose turn is next, what it waits for, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from baton.core.messages import (
    CloseRequest,
    CoordinatorCommand,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    StartPrefill,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.report_parts import StepPrices
from baton.core.ticking import TokensServed, WaitedTooLong
from baton.core.types import HostId, Request, RequestId, Role, Slo, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator, Policies
from baton.decide.control.start_queue import StartQueue
from baton.decide.control.turn_queue import AHEAD_REQUESTS, AHEAD_S, TokenCount
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.admission import BoundedQueue
from baton.decide.policy.fairness import FairnessPolicy, FirstComeFirstServed
from baton.decide.policy.placement import FastestStep
from baton.decide.policy.routing import EarliestFirstToken
from baton.decide.policy.slo_headroom import SloHeadroom
from baton.decide.policy.vtc import VirtualTokenCounter

P, D = WorkerId("p"), WorkerId("d")
PROMPT_TOKENS, STEP_TOKENS = 40, 40
"""Two prompts fill the queue of a worker."""


def view(worker: WorkerId, role: Role, requests_max: int = 4) -> WorkerView:
    return WorkerView(id=worker, host=HostId("h"), role=role, step_tokens_max=STEP_TOKENS, requests_max=requests_max)


def coordinator(
    fairness: FairnessPolicy,
    *views: WorkerView,
    wait_s_max: float | None = None,
    headroom: SloHeadroom | None = None,
) -> Coordinator:
    policies = Policies(
        admission=headroom or BoundedQueue(),
        routing=headroom or EarliestFirstToken(),
        placement=headroom or FastestStep(),
        fairness=fairness,
        cost=LinearCost(),
    )
    made = Coordinator(policies, block_tokens=4, queue=StartQueue(wait_s_max))
    for each in views:
        made.handle(WorkerJoined(each), 0.0)
    return made


def asked(name: str, tenant: str, arrived_at_s: float = 0.0) -> Request:
    return Request(
        id=RequestId(name),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens_max=9,
        arrived_at_s=arrived_at_s,
        tenant=tenant,
    )


def started(commands: Sequence[CoordinatorCommand]) -> list[str]:
    return [command.request.id for command in commands if isinstance(command, StartPrefill)]


def crowd(made: Coordinator, count: int) -> list[str]:
    """Let requests of one tenant arrive. Return those that are sent to a worker."""
    commands: list[CoordinatorCommand] = []
    for place in range(count):
        commands += made.handle(RequestArrived(asked(f"crowd-{place}", "crowd", place)), float(place))
    return started(commands)


def finish(made: Coordinator, name: str, worker: WorkerId, now_s: float = 90.0) -> list[str]:
    return started(made.handle(RequestFinished(RequestId(name), 1, worker, "stop"), now_s))


def test_a_single_request_of_another_tenant_is_next() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    assert crowd(made, 20) == ["crowd-0", "crowd-1"], "these keep the worker busy"
    assert started(made.handle(RequestArrived(asked("late", "other", 20.0)), 20.0)) == []
    assert finish(made, "crowd-0", P) == ["crowd-2"], "equal counters: a tenant that comes is not served more"
    assert finish(made, "crowd-1", P) == ["late"]


def test_workers_serve_by_turn() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    (first, second) = (command for name in "ab" for command in made.handle(RequestArrived(asked(name, "t")), 0.0))
    assert isinstance(first, StartPrefill)
    assert isinstance(second, StartPrefill)
    assert (first.request.turn, second.request.turn) == (1, 2)


def test_without_service_in_the_order_workers_queue_requests_themselves() -> None:
    made = coordinator(FirstComeFirstServed(), view(P, "mixed"))
    assert len(crowd(made, 20)) == 20
    assert not made.turns.is_used


def test_output_of_every_worker_counts_for_the_next_turn() -> None:
    counters = VirtualTokenCounter()
    made = coordinator(counters, view(P, "prefill"), view(D, "decode"))
    for name, tenant in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b")):
        made.handle(RequestArrived(asked(name, tenant)), 0.0)
    made.handle(TokensServed(((RequestId("a0"), 7), (RequestId("closed"), 3))), 1.0)
    assert counters.counter("a") - counters.counter("b") == 2 * 7
    assert started(made.handle(PrefillFinished(RequestId("a0"), 1, P, PROMPT_TOKENS), 2.0)) == ["b1"]


def test_no_more_requests_are_on_workers_than_decode_has_places() -> None:
    """Others would wait there with their KV, ahead of a tenant that has had less."""
    made = coordinator(VirtualTokenCounter(), view(P, "prefill"), view(D, "decode", requests_max=2))
    begun = crowd(made, 20)
    while begun and made.turns:
        last = begun
        begun = [
            name
            for each in last
            for name in started(made.handle(PrefillFinished(RequestId(each), 1, P, PROMPT_TOKENS), 30.0))
        ]
    assert made.live_requests - len(made.turns) == 2 + AHEAD_REQUESTS


def test_a_report_of_less_load_gives_the_next_turn() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    crowd(made, 3)
    report = replace(view(P, "mixed"), newest_request=RequestId("crowd-1"), queued_tokens=PROMPT_TOKENS)
    assert started(made.handle(WorkerReported(report), 5.0)) == ["crowd-2"]


def test_a_request_that_ends_before_its_turn_leaves_the_queue() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    crowd(made, 4)
    made.handle(RequestCancelled(RequestId("crowd-2")), 5.0)
    assert finish(made, "crowd-0", P) == ["crowd-3"]


def test_without_a_worker_requests_wait_for_one_up_to_the_limit() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    crowd(made, 3)
    made.handle(WorkerLost(P, "killed"), 10.0)
    assert len(made.turns) == 0
    assert made.waiting_since_s == 10.0
    closes = [one for one in made.handle(WaitedTooLong(5.0), 15.0) if isinstance(one, CloseRequest)]
    assert [close.reject for close in closes] == ["no_worker"] * 3


def test_a_worker_that_comes_back_serves_by_turn() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    crowd(made, 5)
    made.handle(WorkerLost(P, "killed"), 10.0)
    made.handle(RequestArrived(asked("late", "other", 11.0)), 11.0)
    assert started(made.handle(WorkerJoined(view(P, "mixed")), 12.0)) == ["crowd-0", "crowd-1"], "had their turn before"
    assert finish(made, "crowd-0", P) == [], "its second attempt runs"
    made.handle(RequestFinished(RequestId("crowd-0"), 2, P, "stop"), 13.0)
    commands = made.handle(RequestFinished(RequestId("crowd-1"), 2, P, "stop"), 14.0)
    assert "late" in started(commands)


class Broken(VirtualTokenCounter):
    """Counts nothing, because it raises."""

    def key(self, request: Request) -> tuple[float, ...]:
        if request.tenant == "crowd" and request.id != "crowd-0":
            return (float(request.priority), request.arrived_at_s)
        return VirtualTokenCounter.key(self, request)

    def joined(self, request: Request) -> None:
        raise KeyError(request.tenant)


def test_a_policy_that_raises_loses_no_request() -> None:
    made = coordinator(Broken(), view(P, "mixed"))
    assert crowd(made, 4) == ["crowd-0", "crowd-1"]
    assert finish(made, "crowd-0", P) == ["crowd-2"]
    assert "KeyError" in made.turns.failure


def test_admission_sees_the_part_of_the_queue_that_comes_first() -> None:
    """100 prompts of the crowd take longer than 16 of them, one of another tenant does not."""
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"))
    slo = Slo(ttft_s=LinearCost().prefill_s(new_tokens=8 * PROMPT_TOKENS, cached_tokens=0) * 2, tpot_s=9.0)
    crowd(made, 100)
    (refused,) = made.handle(RequestArrived(replace(asked("one more", "crowd", 100.0), slo=slo)), 100.0)
    assert isinstance(refused, CloseRequest)
    assert refused.reject == "slo", "the whole queue is the share of the only tenant"
    assert made.handle(RequestArrived(replace(asked("other", "other", 100.0), slo=slo)), 100.0) == []
    assert RequestId("other") in made.turns
    (refused,) = made.handle(RequestArrived(replace(asked("another", "crowd", 100.0), slo=slo)), 100.0)
    assert isinstance(refused, CloseRequest)
    assert refused.reject == "share"
    assert "later than the SLO" in refused.reason
    assert "more than its share of the queue" in refused.reason


def test_only_the_tenant_with_more_than_its_share_is_refused() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"), wait_s_max=10.0)
    crowd(made, 60)
    made.handle(RequestArrived(asked("other-0", "other", 60.0)), 60.0)
    for place in range(8):  # a request starts every second
        made.queue.start(RequestId(f"crowd-{place}"), 60.0 + place)
    (refused,) = made.handle(RequestArrived(asked("one more", "crowd", 68.0)), 68.0)
    assert isinstance(refused, CloseRequest)
    assert refused.reject == "share"
    assert "more than its share of the queue" in refused.reason
    assert refused.retry_after_s is not None
    made.handle(RequestArrived(asked("other-1", "other", 68.0)), 68.0)
    assert RequestId("other-1") in made.turns


def test_the_tpot_that_admission_predicted_is_known_at_the_turn_after_other_admissions() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed"), headroom=SloHeadroom())
    commands: list[CoordinatorCommand] = []
    for name in ("a", "b", "c", "d"):
        arrived = replace(asked(name, "t"), slo=Slo(ttft_s=900.0, tpot_s=9.0))
        commands += made.handle(RequestArrived(arrived), 0.0)
    assert started(commands) == ["a", "b"]
    commands += made.handle(RequestFinished(RequestId("a"), 1, P, "stop"), 1.0)
    commands += made.handle(RequestFinished(RequestId("b"), 1, P, "stop"), 2.0)
    assert started(commands) == ["a", "b", "c", "d"]
    starts = [command for command in commands if isinstance(command, StartPrefill)]
    assert all(start.predicted is not None and start.predicted.tpot_s > 0 for start in starts)


def test_tokens_are_counted_only_if_a_policy_reads_them() -> None:
    for is_used, expected in ((True, TokensServed(((RequestId("a"), 2), (RequestId("b"), 1)))), (False, None)):
        count = TokenCount(is_used)
        for name in "aba":
            count.add(RequestId(name))
        assert count.take() == expected
        assert count.take() is None


def test_slow_prompts_wait_at_the_coordinator_so_that_the_next_turn_comes_soon() -> None:
    """By the length of its steps alone, the worker would get thirty prompts, which take four seconds."""
    wide = replace(view(P, "mixed", requests_max=64), step_tokens_max=15 * PROMPT_TOKENS)
    made = coordinator(VirtualTokenCounter(), wide)
    prompt_s = LinearCost().prefill_s(new_tokens=PROMPT_TOKENS, cached_tokens=0)
    assert len(crowd(made, 20)) == ceil(AHEAD_S / prompt_s) < 5
    quick = coordinator(VirtualTokenCounter(), replace(wide, prices=StepPrices(0.01, (1.0,) * 5, 0.0, 50)))
    assert len(crowd(quick, 40)) == 30


def test_a_turn_respects_the_hosts_that_a_request_may_use() -> None:
    """A proxy may allow some servers of a pool only."""
    here, there = view(P, "mixed"), replace(view(D, "mixed"), host=HostId("other"))
    for allowed in (here, there):
        made = coordinator(VirtualTokenCounter(), here, there)
        request = replace(asked("a", "x"), hosts=(allowed.host,))
        (start,) = made.handle(RequestArrived(request), 0.0)
        assert isinstance(start, StartPrefill)
        assert start.worker == allowed.id


def test_a_request_whose_hosts_are_lost_does_not_hold_up_the_queue() -> None:
    other = replace(view(D, "mixed", requests_max=1), host=HostId("other"))
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=1), other)
    for number, (name, hosts) in enumerate({"a": ("h",), "b": ("other",), "c": ("other",), "d": ()}.items()):
        request = replace(asked(name, "x", float(number)), hosts=tuple(map(HostId, hosts)))
        made.handle(RequestArrived(request), float(number))
    made.handle(WorkerLost(D, "killed"), 4.0)
    made.handle(RequestCancelled(RequestId("b")), 4.0)
    assert started(made.handle(RequestFinished(RequestId("a"), 1, P, "stop"), 5.0)) == ["d"], "c has no worker"
    assert started(made.handle(WorkerJoined(other), 6.0)) == ["c"]
