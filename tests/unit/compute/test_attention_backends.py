"""Types and limits of the torch attention backend. tests/conformance compares all backends with the formula."""

from __future__ import annotations

import pytest
import torch

from baton.compute.torch.kernels import torch_sdpa
from baton.compute.torch.kernels.linear import DenseLinear, make_linear
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVLayout

LAYERS = 2
MIXED = [(1, 40), (33, 0), (1, 7), (5, 60), (1, 8), (2, 0)]
"""(New tokens, tokens before) of each request."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_may_differ_between_arena_and_queries(kv_dtype: str, dtype: torch.dtype) -> None:
    _compare(MIXED, window=None, group=3, kv_dtype=kv_dtype, dtype=dtype)


def test_tiles_and_small_scratch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits: every chunk in tiles of 4 queries, every decoding request in its own batch."""
    monkeypatch.setattr(torch_sdpa, "TILE_QUERIES", 4)
    monkeypatch.setattr(torch_sdpa, "SCRATCH_BYTES", 1)
    for window in (None, 6):
        _compare(MIXED, window=window, group=2, kv_dtype="float32", dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias_scale", [None, 2.0])
def test_a_packed_linear_layer_equals_a_dense_one(dtype: torch.dtype, bias_scale: float | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 33).to(dtype)
    bias = None if bias_scale is None else (torch.randn(50) * bias_scale).to(dtype)
    packed, dense = make_linear(weight, bias), DenseLinear(weight, bias)
    for rows in (1, 2, 17, 300):
        inputs = torch.randn(rows, 33).to(dtype)
        torch.testing.assert_close(packed(inputs), dense(inputs), atol=3 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def _compare(
    sizes: list[tuple[int, int]], *, window: int | None, group: int, kv_dtype: str, dtype: torch.dtype
) -> None:
    """Compare with the formula. sizes: (new tokens, tokens before) of each request. Unwritten slots are NaN."""
    torch.manual_seed(1)
    layout = KVLayout(layers=LAYERS, kv_heads=2, head_dim=8, block_tokens=16, dtype=kv_dtype)
    counts = [-(-(count + start) // 16) for count, start in sizes]
    kv = PagedKV(torch.full((layout.block_bytes * (sum(counts) + 3),), 255, dtype=torch.uint8), layout)
    ids = torch.randperm(sum(counts) + 3)[: sum(counts)].split(counts)
    rows, first = [], 0
    for (count, start), blocks in zip(sizes, ids, strict=True):
        rows.append(Row(first=first, count=count, start=start, blocks=blocks))
        first += count
    everything = [Row(first=0, count=row.total, start=0, blocks=row.blocks) for row in rows]
    for layer in range(LAYERS):
        tokens = sum(row.total for row in rows)
        kv.write(layer, kv.slots(everything), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8))
    queries = torch.randn(first, 2 * group, 8).to(dtype)
    fast, slow = SdpaBackend().plan(rows, kv), ReferenceBackend().plan(rows, kv)
    for layer in range(LAYERS):
        expected = slow.run(layer, queries, window)
        assert not expected.isnan().any()
        torch.testing.assert_close(
            fast.run(layer, queries, window), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
        )
