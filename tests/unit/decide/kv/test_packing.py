"""Sizes, order and refusals of packed blocks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.decide.kv.layout import KVLayout
from baton.decide.kv.packing import Packing, Run
from baton.move.store.memory import MemoryStore
from baton.move.store.packed import PackedStore
from tests.stores import names

LAYOUT = KVLayout(layers=5, kv_heads=2, head_dim=64, block_tokens=4, dtype="bfloat16")
LAYER_CELLS = 2 * 2 * 4


def test_exact_layers_are_the_first_and_the_last_ones() -> None:
    runs = Packing(LAYOUT, "mxfp4", exact_layers=3).runs
    assert runs == (Run(2 * LAYER_CELLS, True), Run(2 * LAYER_CELLS, False), Run(LAYER_CELLS, True))
    assert Packing(LAYOUT, "mxfp4").runs == (Run(5 * LAYER_CELLS, False),)
    assert Packing(LAYOUT, "mxfp4", exact_layers=99).loss == ""


def test_each_rank_has_its_layers_in_its_own_part() -> None:
    layout = msgspec.structs.replace(LAYOUT, tensor_parallel=2, pipeline_parallel=2)
    half = LAYER_CELLS // 2
    runs = Packing(layout, "int8", exact_layers=1).runs
    assert runs == (Run(half, True), Run(2 * half, False), Run(half, True), Run(6 * half, False))
    assert sum(run.cells for run in runs) * layout.head_bytes == layout.block_bytes


def test_ranks_that_share_tokens_pack_no_cell_twice() -> None:
    """Two ranks hold each head; without context parallelism, both hold all tokens."""
    layout = msgspec.structs.replace(LAYOUT, tensor_parallel=4, context_parallel=2)
    assert Packing(layout, "int8").runs == Packing(LAYOUT, "int8").runs
    assert layout.block_bytes == LAYOUT.block_bytes


def test_4_bits_take_about_a_quarter_of_bfloat16() -> None:
    assert Packing(LAYOUT, "mxfp4").block_bytes * 128 == LAYOUT.block_bytes * 34
    assert Packing(LAYOUT, "fp4").block_bytes * 128 == LAYOUT.block_bytes * 37


@pytest.mark.parametrize(
    ("dtype", "kv", "head_dim", "reason"),
    [
        ("int8", "uint8", 64, "no conversion to int8"),
        ("bfloat16", "int8", 64, "takes 128 bytes per head"),
        ("mxfp4", "bfloat16", 80, "one scale per 32 numbers, and heads have 80"),
    ],
)
def test_what_cannot_be_packed_is_told(dtype: str, kv: str, head_dim: int, reason: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=kv, head_dim=head_dim)
    (problem,) = Packing(layout, dtype).problems()  # type: ignore[arg-type]
    assert reason in problem
    assert not Packing(LAYOUT, "mxfp4").problems()


def test_a_store_rounds_its_layers_and_keeps_the_exact_ones() -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype="float32")
    packing = Packing(layout, "int8", exact_layers=2)
    store = PackedStore(MemoryStore(block_bytes=packing.block_bytes, capacity_bytes=10 * packing.block_bytes), packing)
    numbers = np.random.default_rng(0).normal(size=(3, *layout.shape)).astype(np.float32)
    (first, second, third, odd), read = names(4), np.zeros_like(numbers)
    blocks = [(name, memoryview(numbers[row]).cast("B")) for row, name in enumerate((first, second, third))]
    assert store.put([*blocks, (odd, memoryview(b"short"))]) == [True, True, True, False]
    assert store.get([(name, memoryview(read[row]).cast("B")) for row, (name, _) in enumerate(blocks)]) == [True] * 3
    assert np.array_equal(read[:, [0, 4]], numbers[:, [0, 4]])
    lost = np.abs(read - numbers)[:, 1:4]
    assert 0 < lost.max() <= np.abs(numbers).max() / 250
