"""The contract of every StepEngine with the batcher and the arena."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import transformers

from baton.compute.hash_engine import hash_card
from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling
from tests.unit.compute.models import TINY, engine_of, generate, part_of, poison, run, tiny_llama, tiny_model
from tests.unit.compute.rank_threads import parallel_engine

BLOCKS = 64
PROMPT = [5, 17, 42, 8, 8, 90, 33, 61, 12, 77, 4, 29, 55, 3, 68, 20, 91, 47, 9]


@dataclass
class Made:
    engine: StepEngine
    arena: bytearray
    again: Callable[[], tuple[StepEngine, bytearray]]


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelCard]:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    card = resolve_model(str(folder))
    folder = tmp_path_factory.mktemp("experts")
    tiny_model(transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)).save_pretrained(folder)
    experts = resolve_model(str(folder))
    return {"hash": hash_card(), "torch": card, "native": card, "native_experts": experts, "ranks": card}


@pytest.fixture(params=["hash", "torch", "native", "native_experts", "ranks"])
def made(request: pytest.FixtureRequest, cards: dict[str, ModelCard]) -> Iterator[Made]:
    """Make each engine. `ranks`: two tensor ranks in each of two stages."""
    card, kind = cards[request.param], {"hash": None, "native_experts": "native"}.get(request.param, request.param)
    with ExitStack() as stack:
        yield _made(card, kind) if kind != "ranks" else _ranks(card, stack)


def _ranks(card: ModelCard, stack: ExitStack) -> Made:
    def make() -> tuple[StepEngine, bytearray]:
        engine, arena, _ = stack.enter_context(parallel_engine(card, tensor=2, pipeline=2, blocks=BLOCKS))
        return engine, arena

    engine, arena = make()
    poison(arena)
    return Made(engine, arena, make)


def _made(card: ModelCard, kind: Literal["torch", "native"] | None) -> Made:
    engine, arena = engine_of(card, blocks=BLOCKS, kind=kind)
    poison(arena)
    return Made(engine, arena, lambda: engine_of(card, blocks=BLOCKS, kind=kind))


def test_a_prompt_in_chunks_gives_the_text_of_a_prompt_at_once(made: Made) -> None:
    """Chunk borders, even inside a block, do not change results."""
    whole = generate(made.engine, PROMPT, range(16), 12)
    for cuts in ([4, 8], [1, 2, 3], [7, 18], [5, 6, 13]):
        table = list(range(20, 36))
        for start, end in itertools.pairwise([0, *cuts]):
            assert run(made.engine, part_of(PROMPT, table, start=start, end=end))[0].token is None
        first = run(made.engine, part_of(PROMPT, table, start=cuts[-1]))[0].token
        assert first == whole[0]
        assert _continue(made.engine, [*PROMPT, first], table, 11) == whole[1:]


def test_progress_counts_every_layer_of_a_step(made: Made) -> None:
    """A rank counts its own layers."""
    if made.engine.layout.ranks > 1:
        pytest.skip("ranks finish layers at different times, and no code observes them")
    made.engine.progress.layers = 0
    run(made.engine, part_of(PROMPT, list(range(16)), start=0))
    assert made.engine.progress.layers == made.engine.layout.layers


def test_block_ids_do_not_matter(made: Made) -> None:
    """A request in other blocks, in any order, gives the same text."""
    shuffled = random.Random(3).sample(range(BLOCKS), 16)
    expected = generate(made.engine, PROMPT, range(16), 12)
    assert generate(made.engine, PROMPT, shuffled, 12) == expected


def test_other_requests_of_a_batch_do_not_matter(made: Made) -> None:
    """Decode and prefill in one batch give each request its result alone."""
    prompts = [PROMPT[:size] for size in (1, 3, 4, 5, 13, 19)]
    tables = [range(8 * index, 8 * index + 8) for index in range(len(prompts))]
    alone = [generate(made.engine, prompt, table, 3) for prompt, table in zip(prompts, tables, strict=True)]
    made.arena[:] = b"\xff" * len(made.arena)
    tokens = [list(prompt) for prompt in prompts]
    starts = [0] * len(prompts)
    for waiting in (3, 1, 0, 0, 0):  # the last ones join later: prefills meet decodes in one step
        active = [i for i in range(len(prompts) - waiting) if len(tokens[i]) < len(prompts[i]) + 3]
        parts = [part_of(tokens[i], tables[i], start=starts[i], prompt_tokens=len(prompts[i])) for i in active]
        for index, result in zip(active, run(made.engine, *parts), strict=True):
            starts[index] = len(tokens[index])
            assert result.token is not None
            tokens[index].append(result.token)
    assert [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)] == alone


def test_no_byte_is_written_outside_the_slots_of_the_new_tokens(made: Made) -> None:
    """Neither in other blocks, nor in other slots of its own blocks."""
    layout = made.engine.layout
    noise = random.Random(1).randbytes(len(made.arena))
    for start, end in ((0, 6), (6, 7), (7, len(PROMPT))):
        table = [9, 2, 30, 11, 5]
        run(made.engine, part_of(PROMPT, table, end=start)) if start else None
        made.arena[:] = noise
        run(made.engine, part_of(PROMPT, table, start=start, end=end))
        touched = {
            (table[position // layout.block_tokens], position % layout.block_tokens) for position in range(start, end)
        }
        for block, slot, begin, size in _slots(made.engine):
            same = made.arena[begin : begin + size] == noise[begin : begin + size]
            assert same == ((block, slot) not in touched), (block, slot)


def test_the_content_of_unwritten_slots_does_not_matter(made: Made) -> None:
    """Blocks contain old bytes or NaN, which affect no token."""
    expected = generate(made.engine, PROMPT, range(16), 8)
    for filling in (b"\x00", b"\x7f"):
        made.arena[:] = filling * len(made.arena)
        assert generate(made.engine, PROMPT, range(16), 8) == expected


def test_a_shared_prefix_need_not_be_computed_again(made: Made) -> None:
    """Two requests read the same blocks; each writes only its own tail."""
    shared, layout = PROMPT[:16], made.engine.layout
    endings = ([1, 2, 3], [90, 7])
    alone = [generate(made.engine, [*shared, *ending], range(16), 6) for ending in endings]
    run(made.engine, part_of(shared, range(16)))
    prefix = range(16 // layout.block_tokens)
    tables = [[*prefix, 40, 41, 42], [*prefix, 50, 51, 52]]
    tokens = [[*shared, *ending] for ending in endings]
    parts = [part_of(row, table, start=16) for row, table in zip(tokens, tables, strict=True)]
    firsts = [result.token for result in run(made.engine, *parts)]
    for row, first, table, expected in zip(tokens, firsts, tables, alone, strict=True):
        assert [first, *_continue(made.engine, [*row, first], table, 5)] == expected


def test_another_engine_continues_a_request(made: Made) -> None:
    """The tokens and blocks of a request are its whole state, as handoff and failover need it."""
    expected = generate(made.engine, PROMPT, range(16), 12)
    other, arena = made.again()
    arena[:] = made.arena
    tokens = [*PROMPT, *expected[:5]]
    assert _continue(other, tokens, range(16), 7) == expected[5:]


def test_a_changed_block_changes_what_follows(made: Made) -> None:
    """Attention reads all KV of the blocks, so a wrong byte anywhere changes the result."""
    run(made.engine, part_of(PROMPT, range(16)))
    sampling = Sampling(temperature=0.0, top_logprobs=0)
    last = part_of([*PROMPT, 7], range(16), start=len(PROMPT), sampling=sampling)
    before = run(made.engine, last)[0]
    layout = made.engine.layout
    changed = 0
    for block in range(len(PROMPT) // layout.block_tokens):
        kept = bytes(made.arena)
        begin = block * layout.block_bytes
        made.arena[begin : begin + layout.block_bytes] = kept[3 * layout.block_bytes : 4 * layout.block_bytes]
        if block != 3:
            changed += run(made.engine, last)[0] != before
        made.arena[:] = kept
    assert changed == len(PROMPT) // layout.block_tokens - 1
    assert run(made.engine, last)[0] == before


def test_results_are_in_the_order_of_the_slices(made: Made) -> None:
    """Short before long, decode before prefill. Slices that do not sample have no token."""
    alone = {size: generate(made.engine, PROMPT[:size], range(8), 1)[0] for size in (1, 2, 9, 19)}
    sizes = (2, 19, 1, 9)
    parts = [part_of(PROMPT[:size], range(8 * i, 8 * i + 8)) for i, size in enumerate(sizes)]
    quiet = part_of(PROMPT, range(40, 48), end=7)
    results = run(made.engine, parts[0], quiet, *parts[1:])
    assert [result.token for result in results] == [alone[2], None, alone[19], alone[1], alone[9]]


def test_an_empty_step_is_no_work(made: Made) -> None:
    assert list(made.engine.execute(Step(())).slices) == []


def test_warm_up_touches_no_block(made: Made) -> None:
    before = bytes(made.arena)
    made.engine.warm_up()
    assert made.arena == before


def test_sampling_depends_on_seed_and_position_only(made: Made) -> None:
    """A sampled text repeats with its seed, alone or in a batch, and differs with another seed."""
    hot = Sampling(temperature=1.5, seed=11)
    expected = generate(made.engine, PROMPT, range(16), 10, hot)
    assert generate(made.engine, PROMPT, range(20, 36), 10, hot) == expected
    assert generate(made.engine, PROMPT, range(16), 10, Sampling(temperature=1.5, seed=12)) != expected
    company = part_of(PROMPT[:9], range(40, 48), sampling=Sampling(temperature=0.7, seed=5))
    mine = part_of(PROMPT, range(16), sampling=hot)
    assert run(made.engine, company, mine)[1].token == expected[0]


def test_no_stop_token_before_the_minimum(made: Made) -> None:
    """Below `output_tokens_min`, no stop token is sampled."""
    stops = tuple(range(0, 96, 2))
    sampling = Sampling(temperature=1.0, stop_token_ids=stops, output_tokens_min=20)
    drawn = generate(made.engine, PROMPT, range(16), 20, sampling)
    assert not set(drawn) & set(stops)
    free = [generate(made.engine, PROMPT, range(16), 8, Sampling(temperature=1.0, seed=seed)) for seed in range(4)]
    if made.engine.layout.dtype != "uint8":  # the hash model writes letters only: most even ids never come
        assert {token for row in free for token in row} & set(stops)


def test_logprobs_are_those_of_the_drawn_token(made: Made) -> None:
    """They are descending, sum to at most 1, and the greedy token is the most likely."""
    sampling = Sampling(temperature=0.0, top_logprobs=5)
    result = run(made.engine, part_of(PROMPT, range(16), sampling=sampling))[0]
    assert result.logprob is not None
    assert result.logprob.token == result.token == result.logprob.top[0][0]
    values = [value for _, value in result.logprob.top]
    assert values == sorted(values, reverse=True)
    assert len({token for token, _ in result.logprob.top}) == 5
    assert result.logprob.logprob == pytest.approx(values[0])


def test_prompt_logprobs_do_not_depend_on_chunks(made: Made) -> None:
    """One entry for every prompt token but the first, in order."""
    sampling = Sampling(temperature=0.0, prompt_logprobs=True, top_logprobs=2)
    whole = run(made.engine, part_of(PROMPT, range(16), sampling=sampling))[0].prompt_logprobs
    assert [entry.token for entry in whole] == PROMPT[1:]
    pieces = [
        entry
        for start, end in ((0, 5), (5, 12), (12, len(PROMPT)))
        for entry in run(made.engine, part_of(PROMPT, range(16), start=start, end=end, sampling=sampling))[
            0
        ].prompt_logprobs
    ]
    assert [entry.token for entry in pieces] == PROMPT[1:]
    assert [entry.logprob for entry in pieces] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


def _continue(engine: StepEngine, tokens: list[int], table: object, count: int) -> list[int]:
    """Continue a request whose tokens are computed except for the last."""
    row = list(tokens)
    for _ in range(count):
        part = Slice(
            request_id=RequestId("r"),
            tokens=row,
            start=len(row) - 1,
            count=1,
            block_table=[BlockId(block) for block in table],
            sample=True,
            sampling=Sampling(temperature=0.0),
            prompt_tokens=len(PROMPT),
        )
        token = run(engine, part)[0].token
        assert token is not None
        row.append(token)
    return row[len(tokens) :]


def _slots(engine: StepEngine) -> Iterator[tuple[int, int, int, int]]:
    """List (block, slot, offset, size) of every token's K and V pieces in the arena."""
    layout = engine.layout
    for block, shard in itertools.product(range(BLOCKS), layout.shards):
        piece = len(shard.heads) * layout.head_bytes
        for plane in range(2 * len(shard.layers)):
            for slot in range(layout.block_tokens):
                start = shard.offset_bytes + (plane * layout.block_tokens + slot) * piece
                yield block, slot, block * layout.block_bytes + start, piece


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=5, top_p=0.9, frequency_penalty=0.5)])
def test_drafts_change_nothing_but_the_number_of_steps(made: Made, sampling: Sampling) -> None:
    """Correct drafts are accepted, the first wrong one ends the slice, and its KV does no harm."""
    truth = generate(made.engine, PROMPT, range(16), 12, sampling)
    table = range(20, 36)
    run(made.engine, part_of(PROMPT[:-1], table, sampling=sampling, prompt_tokens=len(PROMPT)))
    wrong = [(token + 1) % 90 + 3 for token in truth]
    for right in (0, 1, 3):
        guesses = [*truth[:right], *wrong[right:4]]
        part = part_of(
            [*PROMPT, *guesses], table, start=len(PROMPT) - 1, sampling=sampling, prompt_tokens=len(PROMPT), drafts=4
        )
        other = part_of(PROMPT, range(40, 56), sampling=sampling)
        found, alone = run(made.engine, part, other)
        assert alone.token == truth[0]
        assert [found.token, *(token for token, _ in found.further)] == truth[: right + 1]
    all_right = part_of(
        [*PROMPT, *truth[:11]],
        table,
        start=len(PROMPT) - 1,
        sampling=sampling,
        prompt_tokens=len(PROMPT),
        drafts=11,
    )
    (found,) = run(made.engine, all_right)
    assert [found.token, *(token for token, _ in found.further)] == truth


def test_drawn_drafts_bring_their_log_probabilities(made: Made) -> None:
    sampling = Sampling(temperature=0.0, top_logprobs=2)
    truth = generate(made.engine, PROMPT, range(16), 3, sampling)
    part = part_of([*PROMPT, *truth[:2]], range(20, 36), sampling=sampling, prompt_tokens=len(PROMPT), drafts=2)
    (found,) = run(made.engine, part)
    assert [logprob.token for _, logprob in found.further if logprob] == truth[1:]
