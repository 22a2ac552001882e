"""Guesses: from the text itself, within every bound, and never in the text unless they were drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.compute.hash_engine import HashEngine, hash_card
from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.messages import BlocksSealed, RequestFinished, StartRequest
from baton.core.step import SliceResult, Step, StepResult
from baton.core.types import (
    BlockId,
    HostId,
    OutputToken,
    Request,
    RequestId,
    Sampling,
    Slo,
    StepShape,
    WorkerId,
    WorkerView,
    pack_tokens,
)
from baton.decide.control.batcher import Batcher
from baton.decide.control.drafting import Drafter, worth_count
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed

CONFIG = SpeculationConfig(tokens_max=5, ngram_min=2, ngram_max=3)


def test_what_followed_before_is_guessed() -> None:
    drafter = Drafter(CONFIG)
    assert drafter.guess([1, 2, 3, 4, 5, 9, 2, 3], 3, ()) == [4, 5, 9]
    assert drafter.guess([1, 2, 3, 4, 5, 9, 2, 3, 4, 7], 3, ()) == []
    assert drafter.guess([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 2, 3, 4], 2, ()) == [7, 2], "the last time counts"
    assert drafter.guess([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 2, 3, 4], 0, ()) == []


def test_a_longer_run_is_believed_before_a_shorter_one() -> None:
    assert Drafter(CONFIG).guess([8, 1, 2, 5, 9, 1, 2, 6, 8, 1, 2], 1, ()) == [5]


def test_a_repetition_is_guessed_on() -> None:
    assert Drafter(CONFIG).guess([4, 7, 4, 7, 4, 7], 5, ()) == [4, 7, 4, 7, 4]


def test_an_end_is_never_guessed() -> None:
    """It would be drawn after the guess before it, at no cost."""
    assert Drafter(CONFIG).guess([1, 2, 3, 0, 4, 1, 2], 5, (0,)) == [3]


def test_the_chance_of_a_draft_is_learned() -> None:
    """A new request counts on one accepted token of three."""
    drafter = Drafter(CONFIG)
    assert drafter.gains(2) == pytest.approx([1 / 3, 1 / 9])
    for _ in range(20):
        drafter.note(1, 0)
    assert drafter.gains(1)[0] < 0.1
    for _ in range(20):
        drafter.note(5, 5)
    assert drafter.gains(5)[4] > 0.5


def test_only_compared_tokens_count() -> None:
    """The first of five drafted tokens was rejected: nothing is known of the other four."""
    long, short = Drafter(CONFIG), Drafter(CONFIG)
    for _ in range(5):
        long.note(5, 0)
        short.note(1, 0)
    assert long.gains(5) == short.gains(5)


def test_a_low_chance_is_forgotten_while_no_draft_is_worth_its_time() -> None:
    drafter = Drafter(CONFIG)
    for _ in range(30):
        drafter.note(1, 0)
    for _ in range(50):
        drafter.skip()
    assert drafter.gains(1)[0] < 0.15
    for _ in range(250):
        drafter.skip()
    assert drafter.gains(1)[0] > 0.3


@pytest.mark.parametrize(
    ("tokens", "times_s", "count"),
    [
        (1, [1.0, 1.05, 1.1, 1.15], 3),  # further rows cost little
        (1, [1.0, 1.7, 2.4, 3.1], 0),
        (1, [1.0, 1.6, 1.6, 1.6], 3),  # one row needs a further tile, which then has room for three
        (4, [1.0, 1.1, 1.2, 1.3], 0),  # others wait for the drafts of one
        (1, [1.0, 1.4, 1.7, 1.9], 0),  # a gain of 7 % is within the errors
        (1, [1.0, 1.1], 1),  # no room for more
    ],
)
def test_drafts_raise_the_expected_tokens_per_second(tokens: int, times_s: list[float], count: int) -> None:
    assert worth_count(tokens, [0.5, 0.25, 0.125], times_s) == count


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    """The index of a prompt of 100,000 tokens would delay the first step of every other request."""
    prompt = [*range(100_000), 5, 6]
    drafter = Drafter(CONFIG)
    assert drafter.guess(prompt, 3, ()) == [7, 8, 9], "the beginning is known at once"
    prompt[-2:] = [90_000, 90_001]
    drafter = Drafter(CONFIG)
    assert [bool(drafter.guess(prompt, 3, ())) for _ in range(100)].index(True) > 50


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), most=st.integers(0, 9), cut=st.integers(0, 40))
def test_guesses_do_not_depend_on_when_the_text_was_learnt(tokens: list[int], most: int, cut: int) -> None:
    steps = Drafter(CONFIG)
    steps.guess(tokens[:cut], most, ()) if tokens[:cut] else None
    assert steps.guess(tokens, most, ()) == Drafter(CONFIG).guess(tokens, most, ())
    assert len(steps.guess(tokens, most, ())) <= min(most, CONFIG.tokens_max)


BLOCK_TOKENS = 4
W = WorkerId("w")
DRAFTS_ARE_CHEAP = LinearCost(decode_request_s=0.0, context_token_s=0.0)


class House:
    """A batcher over the hash engine, with requests that hold all the blocks that they can need."""

    def __init__(
        self, speculation: SpeculationConfig, limits: BatchLimits, cost: LinearCost = DRAFTS_ARE_CHEAP
    ) -> None:
        layout = hash_card().layout(block_tokens=BLOCK_TOKENS, dtype="uint8")
        self.engine = HashEngine(layout, memoryview(bytearray(layout.block_bytes * 512)))
        view = WorkerView(id=W, host=HostId("h"), role="mixed")
        rules = BatcherPolicies(
            batching=MixedChunked(), fairness=FirstComeFirstServed(), cost=cost, speculation=speculation
        )
        self.batcher = Batcher(view, block_tokens=BLOCK_TOKENS, limits=limits, policies=rules)
        self.limits = limits
        self.blocks = 0
        self.steps = self.drafted = self.accepted = 0
        self.tokens: dict[RequestId, list[OutputToken]] = {}
        self.events: list[object] = []

    def start(
        self, name: str, prompt: list[int], sampling: Sampling, output_tokens_max: int, slo: Slo | None = None
    ) -> None:
        request = Request(
            id=RequestId(name),
            prompt_tokens=len(prompt),
            output_tokens_max=output_tokens_max,
            arrived_at_s=0.0,
            sampling=sampling,
            slo=slo,
        )
        count = -(-(len(prompt) + output_tokens_max) // BLOCK_TOKENS)
        table = tuple(BlockId(self.blocks + index) for index in range(count))
        self.blocks += count
        self.tokens[request.id] = []
        self.batcher.apply([StartRequest(request, 1, pack_tokens(prompt), "end", table)])

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Run a step. Return whether there was work."""
        step = self.batcher.plan(0.0)
        if not step.slices:
            return False
        self.steps += 1
        assert step.tokens <= self.limits.step_tokens_max
        self.batcher.commit(step, self.engine.execute(step))
        report = self.batcher.take_report(now_s=0.0, step_s=1.0)
        assert report is not None
        self.drafted += report.drafted_tokens
        self.accepted += report.accepted_tokens
        self.events += report.events
        for token in report.tokens:
            self.tokens[token.request_id].append(token)
        return True

    def text(self, name: str) -> list[int]:
        found = self.tokens[RequestId(name)]
        assert [token.index for token in found] == list(range(len(found)))
        return [token.token for token in found]


def _parrot() -> tuple[list[int], Sampling]:
    """A prompt whose own continuation stands in it: the hash model then says it again, as far as it was copied."""
    return [70, 71, 72, 73, 70, 71, 72], Sampling(temperature=0.0, stop_token_ids=(0,))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, stop_token_ids=(0,)),
        Sampling(temperature=1.0, seed=3, stop_token_ids=(0,), output_tokens_min=20),
        Sampling(temperature=0.7, seed=9, top_logprobs=2),
    ],
)
@pytest.mark.parametrize("tokens_max", [1, 4, 16])
def test_the_text_is_that_without_guesses(sampling: Sampling, tokens_max: int) -> None:
    """Also the log probabilities, the sealed blocks and the end."""
    plain = House(SpeculationConfig(), BatchLimits())
    guessing = House(SpeculationConfig(tokens_max=tokens_max, ngram_min=1, requests_max=9), BatchLimits())
    for house in (plain, guessing):
        for index in range(4):
            house.start(str(index), [70, 71, 72, 70 + index, *range(60, 60 + 5 * index)], sampling, 60)
        house.run()
    for index in range(4):
        name = RequestId(str(index))
        assert guessing.tokens[name] == plain.tokens[name]
    assert guessing.drafted > 0
    kinds = (BlocksSealed, RequestFinished)

    def by_request(house: House) -> list[list[object]]:
        return [
            [
                part
                for event in house.events
                if isinstance(event, kinds) and event.request_id == str(index)
                for part in (event.hashes if isinstance(event, BlocksSealed) else (event.reason,))
            ]
            for index in range(4)
        ]

    assert by_request(guessing) == by_request(plain)


class Parrot(HashEngine):
    """Says the next number of a circle: every guess from the text comes true."""

    def execute(self, step: Step) -> StepResult:
        results = []
        for part in step.slices:
            drawn = []
            for draft in range(part.drafts + 1):
                view = part.at(draft)
                length = view.start + view.count
                drawn.append((70 + (part.tokens[length - 1] - 69) % 6, None))
                if draft < part.drafts and part.tokens[length] != drawn[-1][0]:
                    break
            results.append(SliceResult(token=drawn[0][0] if part.sample else None, further=tuple(drawn[1:])))
        return StepResult(results)


def test_right_guesses_save_steps_and_stay_within_every_bound() -> None:
    house = House(SpeculationConfig(tokens_max=7), BatchLimits(step_tokens_max=12, requests_max=2))
    layout = house.engine.layout
    house.engine = Parrot(layout, memoryview(bytearray(layout.block_bytes * 512)))
    for name, length in (("a", 50), ("b", 23)):
        house.start(name, [70, 71, 72, 73, 74, 75, 70, 71], Sampling(temperature=0.0), length)
    house.run()
    assert house.text("a") == [70 + (2 + index) % 6 for index in range(50)]
    assert house.text("b") == [70 + (2 + index) % 6 for index in range(23)]
    assert house.accepted == house.drafted > 50
    assert house.steps < 20


class RowCost(LinearCost, frozen=True):
    """Every further row costs as much as the step: no draft pays."""

    def step_s(self, shape: StepShape) -> float:
        return 0.01 * max(1, shape.decode_requests)


def test_a_draft_that_costs_more_than_it_can_bring_is_not_made() -> None:
    for cost, drafts in ((RowCost(), False), (DRAFTS_ARE_CHEAP, True)):
        house = House(SpeculationConfig(tokens_max=4), BatchLimits(), cost)
        layout = house.engine.layout
        house.engine = Parrot(layout, memoryview(bytearray(layout.block_bytes * 512)))
        for name in ("a", "b"):
            house.start(name, [70, 71, 72, 73, 74, 75, 70, 71], Sampling(temperature=0.0), 30)
        house.run()
        assert (house.drafted > 0) == drafts


@pytest.mark.parametrize("with_slo", [False, True])
def test_no_drafts_are_made_beside_a_request_with_an_slo(with_slo: bool) -> None:
    """Its admission predicts the time of its tokens by steps without drafts."""
    house = House(SpeculationConfig(tokens_max=4, with_slo=with_slo), BatchLimits())
    layout = house.engine.layout
    house.engine = Parrot(layout, memoryview(bytearray(layout.block_bytes * 512)))
    house.start("a", [70, 71, 72, 73, 74, 75, 70, 71], Sampling(temperature=0.0), 9, Slo(ttft_s=1.0, tpot_s=1.0))
    house.start("b", [70, 71, 72, 73, 74, 75, 70, 71], Sampling(temperature=0.0), 40)
    while len(house.tokens[RequestId("a")]) < 9:
        house.step()
        assert house.drafted == 0 or with_slo
    house.run()
    assert house.drafted > 0, "the request without an SLO is alone at the end"


def test_a_busy_step_makes_no_guesses() -> None:
    house = House(SpeculationConfig(tokens_max=4, ngram_min=1, requests_max=1), BatchLimits())
    for name in ("a", "b"):
        house.start(name, *_parrot(), 5)
    house.run()
    assert house.drafted == 0


def test_a_request_that_is_handed_off_after_this_step_makes_no_guesses() -> None:
    """Drafts would be lost: the request leaves the worker with its first token."""
    house = House(SpeculationConfig(tokens_max=4, ngram_min=1), BatchLimits())
    prompt, sampling = _parrot()
    request = Request(
        id=RequestId("a"), prompt_tokens=len(prompt), output_tokens_max=9, arrived_at_s=0.0, sampling=sampling
    )
    table = tuple(BlockId(index) for index in range(4))
    start = StartRequest(request, 1, pack_tokens(prompt), "first_token", table, computed_tokens=len(prompt) - 1)
    house.batcher.apply([start])
    (part,) = house.batcher.plan(0.0).slices
    assert (part.count, part.drafts) == (1, 0)


def test_guesses_stay_in_the_blocks_that_are_there() -> None:
    """A table that has room for two more tokens takes one guess, whatever was asked for."""
    house = House(SpeculationConfig(tokens_max=9, ngram_min=1), BatchLimits(growth_tokens=1))
    prompt, sampling = [70, 71] * 3, Sampling(temperature=0.0)
    request = Request(
        id=RequestId("a"), prompt_tokens=len(prompt), output_tokens_max=90, arrived_at_s=0.0, sampling=sampling
    )
    table = (BlockId(0), BlockId(1))
    house.batcher.apply([StartRequest(request, 1, pack_tokens([*prompt, 70]), "end", table, computed_tokens=6)])
    (part,) = house.batcher.plan(0.0).slices
    assert (part.start, part.count, part.drafts) == (6, 2, 1)
