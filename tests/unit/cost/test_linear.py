"""The linear cost model: what policies compare must have the right sign, and hits and hosts must count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ports import CostModel
from baton.cost.linear import LinearCost

COST: CostModel = LinearCost()
counts = st.integers(0, 100_000)


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = LinearCost(step_overhead_s=1.0, prefill_token_s=0.5, decode_request_s=0.25, context_token_s=0.125)
    assert cost.step_s(prefill_tokens=2, decode_requests=3, context_tokens=4) == 1.0 + 1.0 + 0.75 + 0.5


def test_nothing_to_compute_takes_no_time() -> None:
    """A full hit, or an empty queue: not even a step's overhead."""
    assert COST.prefill_s(new_tokens=0, cached_tokens=500) == 0.0


def test_a_prompt_reads_its_cached_tokens_and_on_average_half_of_its_own() -> None:
    cost = LinearCost(step_overhead_s=0.0, prefill_token_s=0.0, context_token_s=1.0)
    assert cost.prefill_s(new_tokens=10, cached_tokens=100) == 105.0


@given(new=counts, more=st.integers(1, 1000), cached=counts)
def test_more_to_compute_takes_longer(new: int, more: int, cached: int) -> None:
    assert COST.prefill_s(new_tokens=new + more, cached_tokens=cached) > COST.prefill_s(
        new_tokens=new, cached_tokens=cached
    )


@given(tokens=st.integers(1, 10_000), data=st.data())
def test_a_longer_hit_on_one_prompt_never_costs_more(tokens: int, data: st.DataObject) -> None:
    hit = data.draw(st.integers(0, tokens - 1))
    longer = data.draw(st.integers(hit, tokens))
    short_s = COST.prefill_s(new_tokens=tokens - hit, cached_tokens=hit)
    assert COST.prefill_s(new_tokens=tokens - longer, cached_tokens=longer) <= short_s


@given(prefill=counts, decode=counts, context=counts)
def test_each_part_of_a_step_costs_something(prefill: int, decode: int, context: int) -> None:
    step_s = COST.step_s(prefill_tokens=prefill, decode_requests=decode, context_tokens=context)
    assert step_s < COST.step_s(prefill_tokens=prefill + 1, decode_requests=decode, context_tokens=context)
    assert step_s < COST.step_s(prefill_tokens=prefill, decode_requests=decode + 1, context_tokens=context)
    assert step_s < COST.step_s(prefill_tokens=prefill, decode_requests=decode, context_tokens=context + 1)


@given(tokens=st.integers(1, 100_000))
def test_a_handoff_on_one_host_moves_no_bytes(tokens: int) -> None:
    same_s = COST.handoff_s(tokens=tokens, same_host=True)
    assert same_s == COST.handoff_s(tokens=0, same_host=True)
    assert same_s < COST.handoff_s(tokens=tokens, same_host=False)
