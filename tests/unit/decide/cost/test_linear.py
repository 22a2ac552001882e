"""The linear cost model: what policies compare must have the right sign, and hits and hosts must count."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ports import CostModel
from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.load import load_cost

COST: CostModel = LinearCost()
counts = st.integers(0, 100_000)


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = LinearCost(
        step_overhead_s=1.0, prefill_token_s=0.5, prefill_pair_s=2.0, decode_request_s=0.25, context_token_s=0.125
    )
    shape = StepShape(prefill_tokens=2, prefill_pairs=8.0, decode_requests=3, context_tokens=4)
    assert cost.step_s(shape) == 1.0 + 1.0 + 16.0 + 0.75 + 0.5


def test_nothing_to_compute_takes_no_time() -> None:
    """A full hit, or an empty queue: not even a step's overhead."""
    assert COST.prefill_s(new_tokens=0, cached_tokens=500) == 0.0


def test_a_prompt_reads_its_cached_tokens_and_on_average_half_of_its_own() -> None:
    cost = LinearCost(step_overhead_s=0.0, prefill_token_s=0.0, prefill_pair_s=1.0)
    assert cost.prefill_s(new_tokens=10, cached_tokens=100) == 1055.0


@given(new=st.integers(1, 10_000), cached=counts)
def test_a_prompt_costs_what_the_step_costs_that_computes_it(new: int, cached: int) -> None:
    shape = StepShape(prefill_tokens=new, prefill_chunks=1, prefill_pairs=prefill_pairs(new, cached))
    assert COST.prefill_s(new_tokens=new, cached_tokens=cached) == COST.step_s(shape)


@given(requests=st.integers(1, 300), context=counts, steps=st.integers(0, 50))
def test_a_run_of_decode_steps_is_those_steps(requests: int, context: int, steps: int) -> None:
    """To the last bit: a simulation that jumps over steps ends where one that takes them ends."""
    shapes = [StepShape(decode_requests=requests, context_tokens=context + n * requests) for n in range(steps)]
    run_s = COST.decode_run_s(requests=requests, context_tokens=context, steps=steps)
    assert list(run_s) == [COST.step_s(shape) for shape in shapes]


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


@given(prefill=st.integers(1, 1000), pairs=counts, decode=counts, context=counts)
def test_each_part_of_a_step_costs_something(prefill: int, pairs: int, decode: int, context: int) -> None:
    """Pairs are a prompt's: without one there are none to pay for."""

    def step_s(prefill: int, pairs: int, decode: int, context: int) -> float:
        return COST.step_s(
            StepShape(
                prefill_tokens=prefill, prefill_pairs=float(pairs), decode_requests=decode, context_tokens=context
            )
        )

    base_s = step_s(prefill, pairs, decode, context)
    more_s = step_s(prefill + 1, pairs, decode, context)
    assert base_s < more_s
    assert more_s < step_s(prefill + 1, pairs + 10, decode, context), "pairs are looked at for prompt tokens alone"
    assert base_s < step_s(prefill, pairs, decode + 1, context)
    assert base_s < step_s(prefill, pairs, decode, context + 1)


@given(tokens=st.integers(1, 100_000))
def test_a_handoff_on_one_host_moves_no_bytes(tokens: int) -> None:
    same_s = COST.handoff_s(tokens=tokens, same_host=True)
    assert same_s == COST.handoff_s(tokens=0, same_host=True)
    assert same_s < COST.handoff_s(tokens=tokens, same_host=False)


def test_a_configuration_without_a_cost_means_the_measured_defaults() -> None:
    """What serves when nothing is said is what was measured, in the server, a replay and a cluster file alike."""
    assert load_cost({}, folder=Path()).cost == LinearCost()
