"""Requests that wait until the decode workers have a slot for them."""

from __future__ import annotations

from msgspec.structs import replace

from baton.core.types import HostId, Request, RequestId, Role, Slo, WorkerId, WorkerView
from baton.decide.control.decode_slot_queue import DecodeSlotQueue
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight
from baton.decide.control.start_queue import StartQueue
from baton.decide.control.turn_queue import AHEAD_REQUESTS

BATCH = 4
PLACES = BATCH + AHEAD_REQUESTS


def fleet(*roles: Role) -> Fleet:
    made = Fleet()
    for number, role in enumerate(roles):
        made.join(WorkerView(id=WorkerId(f"w{number}"), host=HostId("h"), role=role, requests_max=BATCH))
    return made


SPLIT = fleet("prefill", "decode")


def request(name: str, *, client: int = 1, slo: Slo | None = None, may_wait: bool = False) -> Request:
    return Request(
        id=RequestId(name), prompt_tokens=4, output_tokens_max=4, arrived_at_s=0.0, client=client, slo=slo,
        may_wait=may_wait,
    )  # fmt: skip


def full(clients: int = 1) -> DecodeSlotQueue:
    """All places are taken, by this number of clients in turn."""
    queue = DecodeSlotQueue(StartQueue(10.0))
    for number in range(PLACES):
        made = request(str(number), client=1 + number % clients)
        assert not queue.has_to_wait(made, SPLIT)
        queue.begin(made)
    return queue


def test_a_request_waits_until_another_one_ends() -> None:
    queue = full()
    late, later = (Flight(request(name, client=1), key=(place,)) for place, name in enumerate(("late", "later")))
    assert queue.has_to_wait(late.request, SPLIT)
    queue.put(later)
    queue.put(late)
    assert queue.give(SPLIT) is None
    queue.close(RequestId("3"))
    assert queue.give(SPLIT) is late
    queue.begin(late.request)
    assert queue.give(SPLIT) is None
    assert len(queue.waiting) == 1
    assert queue.drain() == [later]


def test_a_client_without_its_share_does_not_wait() -> None:
    """Another client fills the places. The new one may have half of them."""
    queue = full()
    for number in range(PLACES // 2):
        made = request(f"b{number}", client=2)
        assert not queue.has_to_wait(made, SPLIT)
        assert queue.overtaken(made, SPLIT) == 0
        queue.begin(made)
    assert queue.has_to_wait(request("one more", client=2), SPLIT)
    queue.put(Flight(request("held", client=1)))
    assert queue.overtaken(request("c", client=3), SPLIT) == 1
    assert queue.overtaken(request("one more", client=2), SPLIT) == 0


def test_only_requests_without_a_short_slo_wait() -> None:
    """Admission predicts the latencies of the others. A further choice does not begin before the first one."""
    queue = full()
    assert not queue.has_to_wait(request("slo", slo=Slo(ttft_s=1.0, tpot_s=1.0)), SPLIT)
    assert queue.has_to_wait(request("slow", slo=Slo(ttft_s=60.0, tpot_s=1.0)), SPLIT)
    assert queue.has_to_wait(request("choice", may_wait=True), SPLIT)
    assert not queue.has_to_wait(request("0"), SPLIT), "it has begun: this is another attempt"
    assert queue.has_to_wait(request("plain"), SPLIT)
    unlimited = DecodeSlotQueue(StartQueue(None))
    for number in range(PLACES):
        unlimited.begin(request(str(number)))
    assert not unlimited.has_to_wait(request("plain"), SPLIT)


def test_streams_from_before_a_restart_may_use_all_slots_of_their_client_but_no_more() -> None:
    """Clients may carry such a stream themselves: one alone gets as many slots as by plain requests."""
    queue = full(clients=2)
    carried = 0
    while not queue.has_to_wait(made := replace(request(f"carried {carried}", client=2), resumed_tokens=3), SPLIT):
        queue.begin(made)
        carried += 1
    assert carried == PLACES - PLACES // 2
    assert not queue.has_to_wait(request("other", client=3), SPLIT)
    queue.put(Flight(made, stage="decode"))
    assert queue.give(SPLIT) is None
    queue.close(RequestId("carried 0"))
    assert queue.give(SPLIT) is not None


def test_a_fleet_of_mixed_workers_has_no_places() -> None:
    """A mixed worker begins no prompt without a place in its batch. One beside a decode worker hands requests off."""
    assert not full().has_to_wait(request("plain"), fleet("mixed", "mixed"))
    lent, queue = fleet("mixed", "decode"), full()
    for number in range(2 * BATCH - PLACES):
        made = request(f"more {number}")
        assert not queue.has_to_wait(made, lent)
        queue.begin(made)
    assert queue.has_to_wait(request("plain"), lent)


def test_a_worker_that_joins_adds_places() -> None:
    queue, held = full(), Flight(request("held"))
    queue.put(held)
    assert queue.give(SPLIT) is None
    assert queue.give(fleet("prefill", "decode", "decode")) is held
