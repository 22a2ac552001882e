"""The order in which a host pool grants blocks, and the messages that it ignores."""

from __future__ import annotations

from baton.core.messages import (
    BlocksGranted,
    BlocksWanted,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
    StartPrefill,
    ToWorker,
)
from baton.core.types import HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed

A = WorkerId("a")


def request(name: str, at_s: float) -> Request:
    return Request(id=RequestId(name), prompt_tokens=8, output_tokens_max=8, arrived_at_s=at_s)


def pool(blocks: int) -> HostPool:
    return HostPool(host=HostId("h"), blocks_total=blocks, block_tokens=4, eviction=LeastRecentlyUsed)


def want(name: str, blocks: int, attempt: int = 1) -> BlocksWanted:
    return BlocksWanted(RequestId(name), attempt, A, blocks)


def test_blocks_go_to_the_request_that_arrived_first_not_to_the_one_that_asked_first() -> None:
    made = pool(4)
    for name, at_s in (("runs", 0.0), ("old", 1.0), ("young", 2.0)):
        made.handle(StartPrefill(request(name, at_s), 1, A, "end"))
    made.handle(want("runs", 4))
    assert made.handle(want("young", 2)) == []
    assert made.handle(want("old", 3)) == []
    made.handle(RequestFinished(RequestId("runs"), 1, A, "length"))
    commands = made.handle(ReleaseBlocks(RequestId("runs")))
    granted = [command.command for command in commands if isinstance(command, ToWorker)]
    assert [grant.request_id for grant in granted if isinstance(grant, BlocksGranted)] == ["old"]


def test_words_of_an_abandoned_attempt_free_nothing() -> None:
    """A restarted worker has the name of the dead one, and its request: only the attempt tells their words apart."""
    made = pool(4)
    asks = request("asks", 0.0)
    made.handle(StartPrefill(asks, 1, A, "end"))
    made.handle(StartPrefill(asks, 2, A, "end"))
    made.handle(want("asks", 3, attempt=2))
    held = made.table(asks.id)
    made.handle(RequestDropped(asks.id, 1, A, preempted=True))
    made.handle(want("asks", 4, attempt=1))
    assert made.table(asks.id) == held
    assert len(held[0]) == 3
