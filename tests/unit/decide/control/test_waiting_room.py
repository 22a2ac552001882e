"""Requests that no worker has wait for one, but not for ever (INV-9)."""

from __future__ import annotations

from baton.core.messages import (
    CloseRequest,
    HostLost,
    ReleaseBlocks,
    RequestArrived,
    StartPrefill,
    WorkerJoined,
)
from baton.core.ticking import WaitedTooLong
from baton.core.types import HostId, Request, RequestId, WorkerId, WorkerView
from baton.decide.control.coordinator import Coordinator
from tests.policies import plain_policies

HOST = HostId("h")
VIEW = WorkerView(id=WorkerId("w"), host=HOST, role="mixed")


def coordinator() -> Coordinator:
    return Coordinator(plain_policies(), block_tokens=4)


def arrived(name: str) -> RequestArrived:
    return RequestArrived(Request(id=RequestId(name), prompt_tokens=8, output_tokens_max=4, arrived_at_s=0.0))


def closed(commands: list) -> dict[str, str | None]:
    return {command.request_id: command.reject for command in commands if isinstance(command, CloseRequest)}


def test_who_has_waited_too_long_is_turned_away_and_who_came_later_waits_on() -> None:
    made = coordinator()
    assert made.waiting_since_s is None
    made.handle(arrived("early"), 1.0)
    made.handle(arrived("late"), 5.0)
    assert made.waiting_since_s == 1.0
    assert made.handle(WaitedTooLong(10.0), 10.9) == []
    commands = made.handle(WaitedTooLong(10.0), 11.0)
    assert closed(commands) == {"early": "no_worker"}
    assert ReleaseBlocks(RequestId("early")) in commands
    assert made.waiting_since_s == 5.0
    assert made.live_requests == 1
    started = made.handle(WorkerJoined(VIEW), 12.0)
    assert [type(command) for command in started] == [StartPrefill]
    assert made.waiting_since_s is None
    assert made.handle(WaitedTooLong(10.0), 99.0) == [], "a worker has it"


def test_a_request_waits_from_when_its_last_worker_was_lost() -> None:
    made = coordinator()
    made.handle(WorkerJoined(VIEW), 0.0)
    made.handle(arrived("r"), 1.0)
    assert made.handle(HostLost(HOST, "gone"), 50.0) == []
    assert made.waiting_since_s == 50.0
    assert made.handle(WaitedTooLong(10.0), 59.0) == []
    (close,) = [command for command in made.handle(WaitedTooLong(10.0), 60.0) if isinstance(command, CloseRequest)]
    assert (close.outcome, close.reject) == ("rejected", "no_worker")
    assert "no worker was available for 10 s" in close.reason
    assert made.live_requests == 0
