"""Commands about an attempt that was given up change nothing in the worker that has the next one."""

from __future__ import annotations

import pytest

from baton.core.config import BatchLimits
from baton.core.messages import BlocksGranted, PreemptRequest, StartRequest, StopRequest
from baton.core.types import BlockId, HostId, Request, RequestId, WorkerId, WorkerView, pack_tokens
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed

A = WorkerId("a")
ID = RequestId("r")


def _batcher() -> Batcher:
    return Batcher(
        WorkerView(id=A, host=HostId("h"), role="mixed"),
        block_tokens=4,
        limits=BatchLimits(),
        policies=BatcherPolicies(batching=MixedChunked(), fairness=FirstComeFirstServed(), cost=LinearCost()),
    )


def test_a_repeated_start_does_not_change_the_newest_request() -> None:
    """The server adds requests that it sent after `newest_request` to the reported load: `b` would count twice."""
    batcher = _batcher()
    first, second = (
        StartRequest(
            Request(id=RequestId(name), prompt_tokens=6, output_tokens_max=2, arrived_at_s=0.0),
            1,
            pack_tokens(range(6)),
            "end",
        )
        for name in "ab"
    )
    batcher.apply([first, second, first])
    assert batcher.view(0.0).newest_request == "b"


@pytest.mark.parametrize(
    "late",
    [
        StopRequest(ID, 1, A),
        PreemptRequest(ID, 1),
        BlocksGranted(ID, 1, (BlockId(7), BlockId(8), BlockId(9)), 0),
    ],
)
def test_commands_of_an_abandoned_attempt_are_dropped(late: StopRequest | PreemptRequest | BlocksGranted) -> None:
    batcher = _batcher()
    request = Request(id=ID, prompt_tokens=6, output_tokens_max=2, arrived_at_s=0.0)
    table = (BlockId(3), BlockId(4))
    batcher.apply([StartRequest(request, 2, pack_tokens(range(6)), "end", block_table=table, computed_tokens=4)])
    batcher.apply([late])
    (part,) = batcher.plan(0.0).slices
    assert tuple(part.block_table) == table
    assert (part.start, part.count) == (4, 2)
