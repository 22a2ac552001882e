"""Layouts, block tables and arenas for tests of conversion, and the naive conversion: token by token, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from baton.core.types import BlockId
from baton.decide.kv.copy_plan import CopyPlan
from baton.decide.kv.layout import KVLayout
from baton.move.transport.convert import unstage

BLOCKS = 24


@dataclass(frozen=True)
class Case:
    """Two arenas' layouts, a request's tables in both, and which of its tokens go over."""

    source: KVLayout
    target: KVLayout
    source_blocks: tuple[BlockId, ...]
    target_blocks: tuple[BlockId, ...]
    tokens: range


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[str, str] = ("bfloat16", "bfloat16")) -> Case:
    layers, heads = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 3, 4, 6)))
    sizes = (32, 96) if {"fp4", "mxfp4"} & set(dtypes) else (1, 2, 5)
    planes, head_dim = draw(st.sampled_from((1, 2))), draw(st.sampled_from(sizes))

    def layout(dtype: str) -> KVLayout:
        ranks = [n for n in (1, 2, 3, 4, 6, 8, 12) if heads % n == 0 or n % heads == 0]
        tensor, block_tokens = draw(st.sampled_from(ranks)), draw(st.integers(1, 9))
        alike = max(1, tensor // heads)
        contexts = [n for n in range(1, 13) if alike % n == 0 and block_tokens % n == 0]
        return KVLayout(
            layers=layers,
            kv_heads=heads,
            head_dim=head_dim,
            planes=planes,
            dtype=dtype,
            block_tokens=block_tokens,
            tensor_parallel=tensor,
            context_parallel=draw(st.sampled_from(contexts)),
            pipeline_parallel=draw(st.integers(1, layers)),
            order=draw(st.sampled_from(("token_major", "head_major"))),
        )

    source, target = (layout(dtype) for dtype in dtypes)
    if draw(st.booleans()):
        target = source if dtypes[0] == dtypes[1] else target
    end = draw(st.integers(1, 40))
    tokens = range(draw(st.integers(0, end - 1)), end)
    return Case(source, target, draw(tables(source, end)), draw(tables(target, end)), tokens)


@st.composite
def tables(draw: st.DrawFn, layout: KVLayout, tokens: int) -> tuple[BlockId, ...]:
    """Draw a table with room for so many tokens: blocks in a row, a few runs of those, or wherever."""
    count = -(-tokens // layout.block_tokens)
    run = draw(st.sampled_from((1, 2, 5, 40)))
    runs = draw(st.permutations(range(-(-count // run))))
    return tuple(BlockId(first * run + at) for first in runs for at in range(run))[:count]


def arena(layout: KVLayout, table: tuple[BlockId, ...], seed: int) -> np.ndarray:
    """Bytes of all blocks up to the last of the table and one more."""
    size = layout.block_bytes * (max(table) + 2)
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def cells(
    layout: KVLayout, table: tuple[BlockId, ...], token: int
) -> Iterator[tuple[tuple[int, int, int], list[slice]]]:
    """Yield (layer, plane, head) of a token, and where each rank that holds it has it in the arena."""
    block, slot = divmod(token, layout.block_tokens)
    for layer in range(layout.layers):
        for plane in range(layout.planes):
            for head in range(layout.kv_heads):
                starts = [
                    table[block] * layout.block_bytes + start
                    for start in holders_of(layout, (layer, plane, head), slot)
                ]
                yield (layer, plane, head), [slice(start, start + layout.head_bytes) for start in starts]


def holders_of(layout: KVLayout, cell: tuple[int, int, int], slot: int) -> Iterator[int]:
    """Walk over a block, cell by cell, and yield the offsets at which one is. As slow as it is simple."""
    at = 0
    ranks, stages = layout.tensor_parallel, layout.pipeline_parallel
    first_layer = 0
    for stage in range(stages):
        layers = range(first_layer, first_layer + layout.layers // stages + (stage < layout.layers % stages))
        first_layer = layers.stop
        for rank in range(ranks):
            heads = [head for head in range(layout.kv_heads) if rank in ranks_of(layout, head)]
            each, part = layout.block_tokens // layout.context_parallel, rank % layout.context_parallel
            tokens = range(part * each, (part + 1) * each)
            if layout.order == "token_major":
                inner = [(head, token) for token in tokens for head in heads]
            else:
                inner = [(head, token) for head in heads for token in tokens]
            for layer in layers:
                for plane in range(layout.planes):
                    for head, token in inner:
                        if (layer, plane, head) == cell and token == slot:
                            yield at
                        at += layout.head_bytes
    assert at == layout.block_bytes


def ranks_of(layout: KVLayout, head: int) -> list[int]:
    """Ranks of a stage that hold a head: each has an equal share; where there are more of them, heads are repeated."""
    ranks, heads = layout.tensor_parallel, layout.kv_heads
    if ranks <= heads:
        return [head // (heads // ranks)]
    return [rank for rank in range(ranks) if rank // (ranks // heads) == head]


def converted_naively(case: Case, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return what the target's arena has to be after tokens of one type of number have gone over."""
    result = target.copy()
    for token in case.tokens:
        there = dict(cells(case.target, case.target_blocks, token))
        for cell, (holder, *_) in cells(case.source, case.source_blocks, token):
            for place in there[cell]:
                result[place] = source[holder]
    return result


def pulled(plan: CopyPlan, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Play a transport and then unstage: return the target's arena afterwards."""
    result = target.copy()
    staging = np.full(plan.staging_bytes, 0xEE, dtype=np.uint8)
    wire = np.concatenate([source[read.offset_bytes : read.offset_bytes + read.size_bytes] for read in plan.reads])
    at = 0
    for landing in plan.landings:
        into = staging if landing.staged else result
        into[landing.offset_bytes : landing.offset_bytes + landing.size_bytes] = wire[at : at + landing.size_bytes]
        at += landing.size_bytes
    assert at == len(wire)
    unstage(plan, memoryview(staging), memoryview(result))
    return result
