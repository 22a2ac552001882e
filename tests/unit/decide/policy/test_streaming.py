"""In how many groups of layers the end of a prompt is sent: by what the wire and the worker take for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.types import Request, RequestId
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.streaming import StreamingPolicy, WhenDone, WhileComputing

COST = LinearCost(step_overhead_s=0.0, prefill_token_s=0.001, prefill_pair_s=0.0, handoff_local_s=0.0)
PROMPT = Request(id=RequestId("r"), prompt_tokens=512, output_tokens_max=8, arrived_at_s=0.0)


def groups(*, token_s: float, compute_token_s: float = 0.001, copy_s: float = 0.001) -> int:
    """The choice for a chunk of 512 tokens over a wire that takes so long for a token."""
    cost = replace(COST, handoff_token_s=token_s, prefill_token_s=compute_token_s)
    return WhileComputing(copy_s=copy_s).layer_groups(PROMPT, 512, cost)


def test_both_are_streaming_policies() -> None:
    assert isinstance(WhenDone(), StreamingPolicy)
    assert isinstance(WhileComputing(), StreamingPolicy)
    assert WhenDone().layer_groups(PROMPT, 512, COST) == 1


def test_a_wire_that_needs_no_time_gets_the_chunk_at_once() -> None:
    assert groups(token_s=0.0) == 1


def test_a_slower_wire_gets_smaller_groups() -> None:
    """As long as it keeps up with the worker: what is exposed is one group."""
    chosen = [groups(token_s=token_s) for token_s in (0.0, 0.00001, 0.0001, 0.0005)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1] <= WhileComputing().layer_groups_max


def test_groups_that_cost_more_are_fewer() -> None:
    assert groups(token_s=0.0002, copy_s=0.01) < groups(token_s=0.0002, copy_s=0.001)


def test_a_wire_that_is_behind_anyway_is_not_held_up_by_many_copies() -> None:
    """It is busy from the first group on: what counts is that this one comes soon, and that copies are few."""
    behind = groups(token_s=0.001, compute_token_s=0.0001, copy_s=0.01)
    assert 1 < behind < 8


@pytest.mark.parametrize("token_s", [0.00001, 0.0002, 0.002])
def test_no_number_of_groups_leaves_much_less_exposed(token_s: float) -> None:
    """Against every number, played out group by group."""

    def exposed_s(count: int) -> float:
        free_s = 0.0
        for group in range(1, count + 1):
            free_s = max(free_s, 0.512 * group / count) + -(-512 // count) * token_s + 0.001
        return free_s - 0.512

    best_s = min(exposed_s(count) for count in range(1, 17))
    assert exposed_s(groups(token_s=token_s)) <= best_s + 0.001 + 1e-9
