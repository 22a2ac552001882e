"""Ragged batches over scattered blocks, to compare attention backends with the formula, on a CPU or a GPU.

Blocks of no request, and slots after a request's last token, hold NaN.
"""

from __future__ import annotations

import torch

from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.decide.kv.layout import KVLayout

LAYERS = 2
DECODE_LAYERS = 4
"""Layers of the arenas in which tests/gpu and benchmarks/gpu_decode.py compare decode kernels. A kernel is compiled for
the size of a block, so the benchmark uses the binaries of the tests."""
TOLERANCE = 2e-5
GPU_TOLERANCE = 5e-3
"""Products of float32 may be computed as TF32."""
TORCH_WARNINGS = ("ignore:The PyTorch API of nested tensors is in prototype stage", "ignore::DeprecationWarning")
"""Filters for tests of torch's backends: its compiler imports modules that use deprecated parts of torch."""
CASES = {
    "one decode": [(1, 37)],
    "first tokens": [(1, 0), (1, 0), (1, 0)],
    "decodes of like length": [(1, 30), (1, 31), (1, 32), (1, 33)],
    "ragged decodes": [(1, 0), (1, 15), (1, 16), (1, 17), (1, 150), (1, 63)],
    "chunk": [(20, 0)],
    "chunk after a prefix": [(20, 45)],
    "chunk over several tiles": [(150, 3)],
    "mixed": [(1, 40), (33, 0), (1, 7), (5, 60), (1, 8), (2, 0)],
}


def compare(
    backend: AttentionBackend,
    sizes: list[tuple[int, int]],
    layout: KVLayout,
    heads: int,
    window: int | None,
    shared_blocks: int = 0,
    blocks_min: int = 0,
    device: str = "cpu",
    values: int = 0,
) -> None:
    """Compare all layers with the formula. sizes: (new tokens, tokens before) of each request.

    shared_blocks: leading blocks that all requests have in common. blocks_min: blocks of the arena.
    values: leading numbers of a head's result that are compared. 0: all of them.
    """
    torch.manual_seed(1)
    counts = [-(-(count + start) // layout.block_tokens) for count, start in sizes]
    blocks = max(blocks_min, sum(counts) + 3)
    kv = PagedKV(torch.full((layout.block_bytes * blocks,), 255, dtype=torch.uint8, device=device), layout)
    tables = list(torch.randperm(blocks)[: sum(counts)].split(counts))
    for table in tables[1:]:
        table[:shared_blocks] = tables[0][:shared_blocks]
    rows: list[Row] = []
    first = 0
    for (count, start), table in zip(sizes, tables, strict=True):
        rows.append(Row(first, count, start, table))
        first += count
    for row in rows:
        positions = torch.arange(row.total)
        places = row.blocks[positions // layout.block_tokens], positions % layout.block_tokens
        numbers = torch.randn(row.total, LAYERS, layout.planes, layout.kv_heads, layout.head_dim)
        kv.data[places[0], :, :, places[1]] = kv.cells(numbers.to(device))
    queries = torch.randn(first, heads, layout.head_dim).to(device)
    expected = [ReferenceBackend().plan(rows, kv).run(layer, queries, window) for layer in range(LAYERS)]
    plan, tolerance = backend.plan(rows, kv), TOLERANCE if device == "cpu" else GPU_TOLERANCE
    for layer in range(LAYERS):
        assert not expected[layer].isnan().any()
        found = plan.run(layer, queries, window).view(queries.shape)[..., : values or None]
        wanted = expected[layer].view(queries.shape)[..., : values or None]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
