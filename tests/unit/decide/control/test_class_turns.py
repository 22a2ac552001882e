"""Service classes in the coordinator's fair queue: reserved places, requests that leave theirs, easier admissions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from baton.core.class_config import ClassConfig
from baton.core.messages import (
    CloseRequest,
    CoordinatorCommand,
    PrefillFinished,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerLost,
)
from baton.core.ticking import QueuedTooLong
from baton.core.types import Request, RequestId, ServiceClass, Slo, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from baton.decide.policy.classes import ClassTable
from baton.decide.policy.vtc import VirtualTokenCounter
from tests.unit.decide.control.test_turn_queue import P, asked, coordinator, view

PREMIUM = ServiceClass(name="premium", priority=-1, decode_ratio=0.5, kv_ratio=0.5, aging_s=10.0)
FREE = ServiceClass(name="free", aging_s=10.0, step_ratio=0.5)
PLACES = 4


def of(name: str, service: ServiceClass, arrived_at_s: float = 0.0) -> Request:
    return replace(asked(name, service.name, arrived_at_s), service=service, prompt_tokens=4)


def arrive(made: Coordinator, *requests: Request, now_s: float = 0.0) -> list[CoordinatorCommand]:
    return [command for request in requests for command in made.handle(RequestArrived(request), now_s)]


def starts(commands: Sequence[CoordinatorCommand]) -> list[str]:
    return [command.request.id for command in commands if isinstance(command, StartPrefill | StartDecode)]


def stops(commands: Sequence[CoordinatorCommand]) -> list[str]:
    return [command.request_id for command in commands if isinstance(command, StopRequest)]


def crowded() -> Coordinator:
    """Return a mixed worker all of whose places are lent to the free class, and two more of its requests."""
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=PLACES))
    commands = arrive(made, *(of(f"f{n}", FREE) for n in range(PLACES + 2)))
    assert starts(commands) == [f"f{n}" for n in range(PLACES)]
    return made


def test_a_lent_place_is_given_back_at_once_and_its_request_goes_on_later() -> None:
    made = crowded()
    commands = arrive(made, of("p0", PREMIUM))
    assert (stops(commands), starts(commands)) == (["f3"], ["p0"]), "it does not wait until the place is free"
    assert made.handle(RequestDropped(RequestId("f3"), 1, P, preempted=False, computed_tokens=4), 1.0) == []
    assert starts(made.handle(RequestFinished(RequestId("p0"), 1, P, "stop"), 2.0)) == ["f3"], "it came before f4"
    (again,) = made.handle(RequestFinished(RequestId("f0"), 1, P, "stop"), 3.0)[-1:]
    assert isinstance(again, StartPrefill)
    assert again.request.id == "f4"


def test_a_class_takes_no_more_than_its_reserve_from_others() -> None:
    made = crowded()
    commands = arrive(made, *(of(f"p{n}", PREMIUM) for n in range(3)))
    assert stops(commands) == ["f3", "f2"], "half of the places"
    assert starts(commands) == ["p0", "p1"]
    made.handle(RequestDropped(RequestId("f3"), 1, P, preempted=False), 1.0)
    assert starts(made.handle(RequestFinished(RequestId("f0"), 1, P, "stop"), 1.0)) == ["p2"], "the more urgent class"


def test_a_request_that_finishes_before_its_stop_frees_its_place() -> None:
    made = crowded()
    arrive(made, of("p0", PREMIUM))
    assert starts(made.handle(RequestFinished(RequestId("f3"), 1, P, "stop"), 1.0)) == []
    assert made.live_requests - len(made.turns) == PLACES
    assert starts(made.handle(RequestFinished(RequestId("p0"), 1, P, "stop"), 1.0)) == ["f4"]


def test_a_paused_decode_continues_with_its_tokens() -> None:
    made = coordinator(
        VirtualTokenCounter(), view(P, "prefill", requests_max=1), view(WorkerId("d"), "decode", requests_max=1)
    )
    arrive(made, *(of(f"f{n}", FREE) for n in range(5)))
    assert starts(made.handle(PrefillFinished(RequestId("f4"), 1, P, 4), 1.0)) == ["f4"]
    assert stops(arrive(made, of("p0", PREMIUM))) == ["f4"]
    made.handle(RequestDropped(RequestId("f4"), 1, WorkerId("d"), preempted=False, computed_tokens=4), 1.0)
    commands = made.handle(RequestFinished(RequestId("f0"), 1, P, "stop"), 2.0)
    (start,) = [command for command in commands if isinstance(command, StartDecode)]
    assert (start.request.id, start.attempt) == ("f4", 2)


def test_a_prompt_that_ends_before_its_stop_waits_for_a_turn_to_decode() -> None:
    """Its slot belongs to another class by then. It keeps its KV, so nothing is computed again."""
    made = coordinator(
        VirtualTokenCounter(), view(P, "prefill", requests_max=1), view(WorkerId("d"), "decode", requests_max=1)
    )
    arrive(made, *(of(f"f{n}", FREE) for n in range(5)))
    assert stops(arrive(made, of("p0", PREMIUM))) == ["f4"]
    assert starts(made.handle(PrefillFinished(RequestId("f4"), 1, P, 4), 1.0)) == []
    commands = made.handle(RequestFinished(RequestId("f0"), 1, P, "stop"), 2.0)
    (start,) = [command for command in commands if isinstance(command, StartDecode)]
    assert (start.request.id, start.attempt) == ("f4", 1)


def test_requests_of_batches_come_after_all_classes() -> None:
    offline = ClassTable((ClassConfig(name="free", priority=100),)).offline().service
    assert offline is not None
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=1))
    arrive(made, of("f0", FREE))
    arrive(made, of("batch", offline), of("f1", replace(FREE, priority=100), 9.0))
    assert starts(made.handle(RequestFinished(RequestId("f0"), 1, P, "stop"), 9.0)) == ["f1"]
    assert starts(made.handle(RequestFinished(RequestId("f1"), 1, P, "stop"), 9.0)) == ["batch"]


def test_a_worker_that_dies_before_it_drops_a_paused_request_loses_nothing() -> None:
    made = crowded()
    arrive(made, of("p0", PREMIUM))
    made.handle(WorkerLost(P, "killed"), 1.0)
    assert made.live_requests == PLACES + 3
    assert len(made.turns) == 0


def test_a_class_that_waits_grows_more_urgent() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=1))
    arrive(made, of("p0", replace(PREMIUM, decode_ratio=0.0)))
    arrive(made, of("f0", FREE), of("p1", replace(PREMIUM, decode_ratio=0.0), 19.0))
    assert starts(made.handle(RequestFinished(RequestId("p0"), 1, P, "stop"), 20.0)) == ["f0"], "20 s: two priorities"


def test_a_class_with_free_places_in_its_reserve_is_not_refused_for_the_queue_of_another() -> None:
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=PLACES), wait_s_max=10.0)
    arrive(made, *(of(f"f{n}", FREE) for n in range(20)))
    for n in range(8):  # a request starts every two seconds
        made.queue.start(RequestId(f"f{n}"), 2.0 * n)
    (refused,) = arrive(made, of("f20", FREE, 16.0), now_s=16.0)
    assert isinstance(refused, CloseRequest)
    assert "p0" in starts(arrive(made, of("p0", PREMIUM, 16.0), now_s=16.0))


def test_a_paused_request_that_had_no_step_is_rejected_at_its_deadline() -> None:
    """Its worker has dropped it, so no worker can reject it."""
    made = coordinator(VirtualTokenCounter(), view(P, "mixed", requests_max=PLACES), wait_s_max=10.0)
    arrive(made, *(of(f"f{n}", FREE) for n in range(PLACES)))
    for n in range(PLACES):
        made.queue.enter(of(f"f{n}", FREE), 1.0, has_blocks=True)
    made.queue.leave(RequestId("f0"))  # it was in a step
    arrive(made, of("p0", PREMIUM, 2.0), now_s=2.0)
    made.handle(RequestDropped(RequestId("f3"), 1, P, preempted=False, computed_tokens=0), 2.0)
    commands = made.handle(QueuedTooLong(), 10.0)
    assert [each.request_id for each in commands if isinstance(each, CloseRequest)] == ["f3"]
    assert stops(commands) == ["f1", "f2"], "their worker decides, because they may be in a step"


def test_a_class_overtakes_a_bounded_number_of_turns() -> None:
    made = coordinator(VirtualTokenCounter(), replace(view(P, "mixed", requests_max=0), step_tokens_max=0))
    commands = arrive(made, *(of(f"f{n}", FREE) for n in range(70)), of("p0", PREMIUM))
    turns = {command.request.id: command.request.turn_key for command in commands if isinstance(command, StartPrefill)}
    assert turns["f0"] < turns["p0"] < turns["f10"]


def test_a_request_that_would_be_rejected_is_degraded_as_its_class_allows() -> None:
    slo = Slo(ttft_s=1e-6, tpot_s=9.0)
    made = coordinator(VirtualTokenCounter(), WorkerView(id=P, host=view(P, "mixed").host, role="mixed"))
    arrive(made, *(of(f"f{n}", FREE) for n in range(3)))  # an idle server would try
    hopeless = replace(of("a", FREE), slo=slo)
    (refused,) = arrive(made, hopeless)
    assert isinstance(refused, CloseRequest)
    easier = replace(hopeless, service=replace(FREE, defer_s=30.0, output_tokens_max=3))
    (start,) = arrive(made, replace(easier, id=RequestId("b")))
    assert isinstance(start, StartPrefill)
    assert (start.request.slo, start.request.output_tokens_max) == (None, 3)
    assert made.queue.deadline_s == 30.0, "the server's queue has no deadline, a deferred request has"
    (closed,) = [each for each in made.handle(QueuedTooLong(), 30.0) if isinstance(each, CloseRequest)]
    assert (closed.request_id, closed.reject) == ("b", "queue_deadline")
