"""Plans of copies between any two layouts, against a walk over tokens and heads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import BITS, KVDtype, KVLayout, loss
from baton.decide.kv.overlap import Cutting
from baton.move.number_formats import decode, encode
from baton.move.transport.convert import convert
from tests.property.kv_forms import Case, arena, cases, cells, converted_naively, pulled

CUTTINGS = st.builds(
    Cutting,
    gap_bytes=st.sampled_from((0, 20, 200, 10**6)),
    in_place_bytes=st.sampled_from((0, 64, 10**9)),
    joined_bytes=st.sampled_from((0, 300, 10**6)),
)


HEADS = KVLayout(layers=1, planes=1, kv_heads=2, head_dim=2, block_tokens=8, dtype="bfloat16", order="head_major")
ACROSS_BLOCKS = Case(
    replace(HEADS, tensor_parallel=2), replace(HEADS, block_tokens=4), (BlockId(0),), (BlockId(3), BlockId(1)), range(8)
)
"""The second head begins in the first target block at the offset where the first head ends in the second."""


@example(case=ACROSS_BLOCKS, cutting=Cutting(in_place_bytes=0), seed=0)
@given(case=cases(), cutting=CUTTINGS, seed=st.integers(0, 99))
def test_a_plan_does_what_a_walk_over_tokens_and_heads_does_and_touches_nothing_else(
    case: Case, cutting: Cutting, seed: int
) -> None:
    source, target = arena(case.source, case.source_blocks, seed), arena(case.target, case.target_blocks, seed + 1)
    expected = converted_naively(case, source, target)
    plan = Conversion(case.source, case.target, cutting=cutting).plan(
        case.source_blocks, case.target_blocks, case.tokens
    )
    assert np.array_equal(pulled(plan, source, target), expected)
    direct = target.copy()
    convert(plan, memoryview(source), memoryview(direct))
    assert np.array_equal(direct, expected)


@settings(max_examples=settings().max_examples // 2)
@given(case=cases(), cutting=CUTTINGS)
def test_only_blocks_that_hold_the_tokens_are_read_and_no_byte_twice(case: Case, cutting: Cutting) -> None:
    """Other blocks may be other people's, and written meanwhile."""
    plan = Conversion(case.source, case.target, cutting=cutting).plan(
        case.source_blocks, case.target_blocks, case.tokens
    )
    size, first = case.source.block_tokens, case.tokens.start // case.source.block_tokens
    blocks = set(case.source_blocks[first : -(-case.tokens.stop // size)])
    seen: set[int] = set()
    for read in plan.reads:
        offsets = range(read.offset_bytes, read.offset_bytes + read.size_bytes)
        assert {offset // case.source.block_bytes for offset in offsets} <= blocks
        assert seen.isdisjoint(offsets)
        seen.update(offsets)
    assert plan.read_bytes <= len(blocks) * case.source.block_bytes
    if cutting.gap_bytes == 0:
        wanted = len(case.tokens) * case.source.planes * case.source.layers * case.source.kv_heads
        assert plan.read_bytes == wanted * case.source.head_bytes


@settings(max_examples=settings().max_examples // 2)
@given(case=cases(), seed=st.integers(0, 99))
def test_there_and_back_gives_the_same_bytes(case: Case, seed: int) -> None:
    source, middle = arena(case.source, case.source_blocks, seed), arena(case.target, case.target_blocks, seed + 1)
    there, back = Conversion(case.source, case.target), Conversion(case.target, case.source)
    convert(there.plan(case.source_blocks, case.target_blocks, case.tokens), memoryview(source), memoryview(middle))
    returned = np.zeros_like(source)
    convert(back.plan(case.target_blocks, case.source_blocks, case.tokens), memoryview(middle), memoryview(returned))
    for token in case.tokens:
        for _, (first, *others) in cells(case.source, case.source_blocks, token):
            for place in (first, *others):
                assert np.array_equal(returned[place], source[first])


@settings(max_examples=settings().max_examples // 2)
@given(case=cases(), seed=st.integers(0, 99))
def test_ranks_that_hold_the_same_head_are_given_the_same_bytes(case: Case, seed: int) -> None:
    source, target = arena(case.source, case.source_blocks, seed), arena(case.target, case.target_blocks, seed + 1)
    plan = Conversion(case.source, case.target).plan(case.source_blocks, case.target_blocks, case.tokens)
    convert(plan, memoryview(source), memoryview(target))
    for token in case.tokens:
        for _, (first, *others) in cells(case.target, case.target_blocks, token):
            assert all(np.array_equal(target[other], target[first]) for other in others)


@settings(max_examples=settings().max_examples // 2)
@given(case=cases(), cutting=CUTTINGS)
def test_tables_may_begin_with_the_block_that_holds_the_first_token(case: Case, cutting: Cutting) -> None:
    conversion = Conversion(case.source, case.target, cutting=cutting)
    first = case.tokens.start
    shorter = (
        case.source_blocks[first // case.source.block_tokens :],
        case.target_blocks[first // case.target.block_tokens :],
    )
    whole = conversion.plan(case.source_blocks, case.target_blocks, case.tokens)
    assert conversion.plan(*shorter, case.tokens, tables_from=first) == whole


@settings(max_examples=settings().max_examples // 2)
@given(case=cases())
def test_what_may_be_spared_is_whole_blocks_within_both_tables(case: Case) -> None:
    """Planned to there, the last block of one layout needs no staging either."""
    end = Conversion(case.source, case.target).spare_end(case.tokens.stop)
    assert case.tokens.stop <= end
    assert end <= len(case.source_blocks) * case.source.block_tokens
    assert end <= len(case.target_blocks) * case.target.block_tokens
    assert end % case.source.block_tokens == 0 or end % case.target.block_tokens == 0


@settings(max_examples=settings().max_examples // 2)
@given(case=cases())
def test_whole_blocks_of_one_layout_are_received_in_place_however_small(case: Case) -> None:
    """One run per stretch of blocks that adjoin, where nothing is held twice."""
    layout = case.source
    end = len(case.source_blocks) * layout.block_tokens
    held_once = layout.tensor_parallel <= layout.kv_heads * layout.context_parallel
    table = case.source_blocks
    plan = Conversion(layout, layout).plan(table, tuple(reversed(table)), range(end))
    stretches = 1 + sum(after != before + 1 for before, after in pairwise(table))
    if held_once:
        assert plan.staging_bytes == 0
        assert not plan.copies
        assert len(plan.reads) == stretches
    else:
        assert plan.staging_bytes == plan.read_bytes


PAIRS = [(one, other) for one in BITS for other in BITS if one != other]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=settings().max_examples // 10)
def test_numbers_of_another_type_are_those_of_each_cell_by_itself(
    pair: tuple[KVDtype, KVDtype], data: st.DataObject, seed: int
) -> None:
    """Any bytes: also numbers without end, and what is none."""
    case = data.draw(cases(pair))
    source, target = arena(case.source, case.source_blocks, seed), arena(case.target, case.target_blocks, seed + 1)
    expected = target.copy()
    for token in case.tokens:
        there = dict(cells(case.target, case.target_blocks, token))
        for cell, (holder, *_) in cells(case.source, case.source_blocks, token):
            for place in there[cell]:
                expected[place] = one_cell(source[holder], case.source, case.target)
    plan = Conversion(case.source, case.target).plan(case.source_blocks, case.target_blocks, case.tokens)
    assert np.array_equal(pulled(plan, source, target), expected)
    convert(plan, memoryview(source), memoryview(target))
    assert np.array_equal(target, expected)


def one_cell(cell: np.ndarray, source: KVLayout, target: KVLayout) -> np.ndarray:
    numbers, result = np.empty(source.head_dim, np.float32), np.empty(target.head_bytes, np.uint8)
    with np.errstate(all="ignore"):
        decode(cell, source.dtype, numbers)
        encode(numbers, target.dtype, result)
    return result


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if loss(*pair) == ""], ids="-".join)
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=settings().max_examples // 10)
def test_a_type_that_loses_nothing_gives_the_same_bytes_back(
    pair: tuple[KVDtype, KVDtype], data: st.DataObject, seed: int
) -> None:
    """Of bytes that an engine wrote: its scales make the largest number of a head the largest code."""
    case = data.draw(cases(pair))
    source = engines_bytes(case.source, case.source_blocks, seed)
    middle, returned = arena(case.target, case.target_blocks, seed), np.zeros_like(source)
    there, back = Conversion(case.source, case.target), Conversion(case.target, case.source)
    convert(there.plan(case.source_blocks, case.target_blocks, case.tokens), memoryview(source), memoryview(middle))
    convert(back.plan(case.target_blocks, case.source_blocks, case.tokens), memoryview(middle), memoryview(returned))
    for token in case.tokens:
        for _, (first, *_) in cells(case.source, case.source_blocks, token):
            assert np.array_equal(returned[first], source[first])


def engines_bytes(layout: KVLayout, table: tuple[BlockId, ...], seed: int) -> np.ndarray:
    """An arena of cells that hold numbers, rounded as engines do it, without a zero that has a sign."""
    cells_count = len(arena(layout, table, seed)) // layout.head_bytes
    random = np.random.default_rng(seed)
    numbers = random.normal(size=(cells_count, layout.head_dim)) * 10.0 ** random.integers(-6, 4, (cells_count, 1))
    numbers = numbers.astype(np.float32)
    result = np.empty((cells_count, layout.head_bytes), np.uint8)
    encode(numbers, layout.dtype, result)
    if layout.dtype == "fp8":
        codes = result[:, :-4]
        codes[codes == 0x80] = 0
    return result.reshape(-1)


@pytest.mark.parametrize("tokens", [range(9), range(7, 7), range(-1, 4), range(3, 8)])
def test_tokens_that_the_tables_do_not_hold_are_our_mistake(tokens: range) -> None:
    """Of two blocks of 4 tokens from token 4 on, and two of 4 from 0 on."""
    layout = replace(HEADS, block_tokens=4)
    blocks = (BlockId(0), BlockId(1))
    with pytest.raises(AssertionError, match="table"):
        Conversion(layout, layout).plan(blocks, blocks, tokens, tables_from=4 if tokens.start == 3 else 0)
