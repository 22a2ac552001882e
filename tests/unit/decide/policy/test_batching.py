"""Batching policies: the requests of the next step, and the tokens of each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import BatchLimits
from baton.core.types import StepShape
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import (
    FIXED_COSTS_MIN,
    BatchingPolicy,
    MixedChunked,
    PrefillFirst,
    SloChunked,
    StaticBatching,
)

COST = LinearCost()
LIMITS = BatchLimits(step_tokens_max=100, requests_max=4)
LIMITS_OF_512 = BatchLimits(step_tokens_max=512)
POLICIES = [
    MixedChunked(),
    PrefillFirst(),
    StaticBatching(),
    SloChunked(),
    SloChunked(tpot_s=0.05),
    SloChunked(prompt_s_max=0.1),
]


@dataclass
class Part:
    remaining_tokens: int
    room_tokens: int = 1000
    computed_tokens: int = 0
    started: bool = False
    last_turn: int = 0
    client: int = 0
    tpot_s: float | None = None
    ahead_s: float = 0.0
    ttft_s: float | None = None
    urgent_ttft_s: float | None = None


def _decode(**values: object) -> Part:
    return Part(1, computed_tokens=50, started=True, **values)  # type: ignore[arg-type]


parts = st.builds(
    Part,
    remaining_tokens=st.sampled_from([1, 1, 1, 2, 30, 500]),
    room_tokens=st.sampled_from([0, 1, 20, 1000]),
    computed_tokens=st.integers(0, 500),
    started=st.booleans(),
    tpot_s=st.sampled_from([None, 0.001, 0.06, 10.0]),
    ahead_s=st.sampled_from([-1.0, 0.0, 0.5]),
    ttft_s=st.sampled_from([None, 0.001, 1.0]),
    urgent_ttft_s=st.sampled_from([None, 0.001, 1.0]),
)


@given(
    policy=st.sampled_from(POLICIES),
    candidates=st.lists(parts, max_size=8),
    step_tokens_max=st.integers(1, 300),
    requests_max=st.integers(1, 6),
)
def test_no_policy_leaves_the_limits_or_stands_still(
    policy: BatchingPolicy, candidates: list[Part], step_tokens_max: int, requests_max: int
) -> None:
    """No request is chosen twice, or with more tokens than it has or has room for."""
    limits = BatchLimits(step_tokens_max=step_tokens_max, requests_max=requests_max)
    chosen = policy.select(candidates, limits, COST)
    assert sum(count for _, count in chosen) <= step_tokens_max
    assert len(chosen) <= requests_max
    assert len({index for index, _ in chosen}) == len(chosen)
    for index, count in chosen:
        assert 1 <= count <= min(candidates[index].remaining_tokens, candidates[index].room_tokens)
    running = sum(part.remaining_tokens == 1 for part in candidates)
    if running < requests_max and all(part.room_tokens for part in candidates):
        assert bool(chosen) == bool(candidates)


def test_decodes_are_in_every_step_and_prompts_share_what_is_left() -> None:
    candidates = [Part(100, 100), Part(1, 5), Part(50, 20), Part(1, 0)]
    limits = BatchLimits(step_tokens_max=111, requests_max=8)
    assert MixedChunked().select(candidates, limits, COST) == [(1, 1), (0, 100), (2, 10)]


def test_prefill_first_stops_decodes_while_a_prompt_is_there() -> None:
    candidates = [_decode(), Part(150), _decode(), Part(30)]
    assert PrefillFirst().select(candidates, LIMITS, COST) == [(1, 100)]
    assert PrefillFirst().select([_decode(), _decode()], LIMITS, COST) == [(0, 1), (1, 1)]
    full = [_decode(), _decode(), _decode(), _decode(), Part(30)]
    assert PrefillFirst().select(full, LIMITS, COST) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_a_static_batch_admits_no_request_until_its_last_ends() -> None:
    policy = StaticBatching()
    assert policy.select([Part(60), Part(60), Part(60)], LIMITS, COST) == [(0, 60), (1, 40)]
    filling = [_decode(), Part(20, computed_tokens=40, started=True), Part(60)]
    assert policy.select(filling, LIMITS, COST) == [(1, 20), (2, 60)]
    closed = [_decode(), _decode(), Part(60)]
    assert policy.select(closed, LIMITS, COST) == [(0, 1), (1, 1)]
    assert policy.select([_decode(), Part(60)], LIMITS, COST) == [(0, 1)]
    assert policy.select([Part(60)], LIMITS, COST) == [(0, 60)]


def test_a_handed_off_request_can_begin_a_static_batch() -> None:
    """It has no prompt left, and has been in no step of this worker."""
    fresh = [Part(1, computed_tokens=50), Part(1, computed_tokens=50)]
    assert StaticBatching().select(fresh, LIMITS, COST) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("tpot_s", [0.06, 0.1, 0.2])
def test_the_slo_decides_how_much_prompt_a_step_takes(tpot_s: float) -> None:
    """The largest chunk whose predicted step keeps nine tenths of the promise: one token more would break that."""
    decode = _decode(tpot_s=tpot_s)
    limits = BatchLimits(step_tokens_max=512)
    (first, (index, count)) = SloChunked().select([decode, Part(1000)], limits, COST)
    assert (first, index) == ((0, 1), 1)

    def step_s(tokens: int) -> float:
        mixed = COST.step_overhead_s + COST.decode_request_s + COST.prefill_token_s * tokens
        return mixed + COST.context_token_s * (51 + tokens)

    assert count == max(16, count)
    bound_s = SloChunked().tpot_slack * tpot_s
    assert count == 16 or step_s(count) <= bound_s * 1.01
    if count < 511:
        assert step_s(count + 2) > bound_s * 0.99


def test_urgent_prompts_take_the_time_that_all_decodes_are_ahead() -> None:
    """A decode that is 0.126 s ahead allows a step of 0.9 * 0.2 s, unless another one is late or prompts can wait."""

    def count(*ahead_s: float, ttft_s: float | None = 1.0) -> int:
        decodes = [_decode(tpot_s=0.06, ahead_s=each) for each in ahead_s]
        return SloChunked().select([*decodes, Part(1000, ttft_s=ttft_s)], LIMITS_OF_512, COST)[-1][1]

    steady = SloChunked().select([_decode(tpot_s=0.06), Part(1000)], LIMITS_OF_512, COST)[-1][1]
    assert count(0.126) == SloChunked().select([_decode(tpot_s=0.2), Part(1000)], LIMITS_OF_512, COST)[-1][1]
    assert count(0.126, 0.126) > count(0.126, 0.0) == count(0.126, -5.0)
    assert count(0.126, ttft_s=100.0) == count(0.126, ttft_s=None) == steady < count(0.126)


def test_without_an_slo_the_token_limit_holds() -> None:
    candidates = [_decode(), Part(1000)]
    assert SloChunked().select(candidates, LIMITS, COST) == MixedChunked().select(candidates, LIMITS, COST)
    assert SloChunked(tpot_s=0.05).select([Part(1000)], LIMITS, COST) == [(0, 100)]


def test_an_unreachable_slo_does_not_starve_prompts() -> None:
    candidates = [_decode(tpot_s=0.000001), Part(1000)]
    assert SloChunked().select(candidates, LIMITS, COST) == [(0, 1), (1, 16)]
    assert SloChunked(chunk_tokens_min=0).select(candidates, LIMITS, COST) == [(0, 1)]


def _prompt_tokens(policy: SloChunked, candidates: list[Part], step_tokens_max: int = 512) -> list[int]:
    chosen = policy.select(candidates, BatchLimits(step_tokens_max=step_tokens_max), COST)
    return [count for index, count in chosen if candidates[index].remaining_tokens > 1]


def test_prompts_share_a_step_only_for_a_tenth_of_their_ttft_slo() -> None:
    """Eight prompts in one step of 1.2 s would all wait for its end, and so would a ninth."""
    counts = _prompt_tokens(SloChunked(), [Part(64, ttft_s=8.0), *[Part(64)] * 7])
    assert COST.prefill_s(new_tokens=sum(counts), cached_tokens=0) <= 0.8 * 1.05
    assert COST.prefill_s(new_tokens=sum(counts) + 2, cached_tokens=0) > 0.8


def test_without_an_slo_prompts_share_steps_for_the_lowest_mean_ttft() -> None:
    """Compare every number of prompts per step. A backlog fills its steps."""
    [size] = {len(_prompt_tokens(SloChunked(), [Part(64)] * 8))}

    def mean_ttft_s(size: int) -> float:
        step_s = COST.step_s(StepShape(prefill_tokens=64 * size, prefill_chunks=size, prefill_pairs=size * 64 * 65 / 2))
        return sum((number // size + 1) * step_s for number in range(8)) / 8

    assert mean_ttft_s(size) < 1.1 * min(map(mean_ttft_s, range(1, 9)))
    assert mean_ttft_s(size) < 0.75 * mean_ttft_s(8)
    assert _prompt_tokens(SloChunked(), [Part(64)] * 16) == [64] * 8


def test_a_single_prompt_is_not_split_for_its_own_ttft_slo() -> None:
    assert _prompt_tokens(SloChunked(), [Part(500, ttft_s=0.4)]) == [500]
    assert _prompt_tokens(SloChunked(), [Part(500, ttft_s=0.4), Part(12, ttft_s=0.4)]) == [500]


def test_a_prompt_is_split_for_the_ttft_slo_of_a_more_urgent_class() -> None:
    """Requests of that class may arrive during the step."""
    [count] = _prompt_tokens(SloChunked(), [Part(500, urgent_ttft_s=1.6)])
    assert 0.38 < COST.prefill_s(new_tokens=count, cached_tokens=0) <= 0.4
    [count] = _prompt_tokens(SloChunked(prompt_s_max=0.5), [Part(500)])
    assert 0.48 < COST.prefill_s(new_tokens=count, cached_tokens=0) <= 0.5


def test_a_short_ttft_slo_does_not_make_steps_that_are_mostly_fixed_cost() -> None:
    [count] = _prompt_tokens(SloChunked(), [Part(500, urgent_ttft_s=0.001)])
    assert COST.prefill_s(new_tokens=count, cached_tokens=0) > 0.9 * FIXED_COSTS_MIN * COST.step_overhead_s


def _play(candidates: list[Part], steps: int) -> list[set[int]]:
    """Return the decoding requests of each step, as a batcher plays them."""
    played: list[set[int]] = []
    turns = 0
    for _ in range(steps):
        chosen = [index for index, _ in MixedChunked().select(candidates, LIMITS, COST)]
        for index in chosen:
            turns += 1
            candidates[index].last_turn = turns
        played.append(set(chosen))
    return played


@given(count=st.integers(1, 30))
def test_decodes_beyond_the_limit_take_turns(count: int) -> None:
    """Each request is in one of every ceil(count / places) steps, and in as many steps as any other."""
    period = -(-count // LIMITS.requests_max)
    played = _play([_decode() for _ in range(count)], 4 * period)
    assert all(len(step) == min(count, LIMITS.requests_max) for step in played)
    for begin in range(len(played) - period + 1):
        assert set().union(*played[begin : begin + period]) == set(range(count))
    served = [sum(index in step for step in played) for index in range(count)]
    assert max(served) - min(served) <= 1


def test_a_client_with_many_streams_does_not_slow_down_another_client() -> None:
    """The newest request is the only one of its client: it is in every step."""
    played = _play([*(_decode(client=1) for _ in range(40)), _decode(client=2)], 30)
    assert all(40 in step and len(step) == LIMITS.requests_max for step in played)
    assert set().union(*played) == set(range(41))


@pytest.mark.parametrize("policy", [MixedChunked(), SloChunked()])
def test_a_prompt_gets_a_place_beside_decodes_that_fill_the_step(policy: BatchingPolicy) -> None:
    """It may be a preempted stream that is computed again."""
    candidates = [*(_decode() for _ in range(6)), Part(30)]
    assert policy.select(candidates, LIMITS, COST) == [(0, 1), (1, 1), (2, 1), (6, 30)]
