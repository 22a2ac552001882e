"""Random decode batches in Triton's interpreter against the formula (hypothesis), for `triton_cases`."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.triton.launch import TritonDecodeKernel
from baton.decide.kv.layout import KVLayout

LAYERS = 2
TOLERANCE = 2e-4
GROUPED = [(4, 2, 64), (3, 1, 80), (8, 1, 96), (2, 2, 128), (4, 4, 192), (2, 1, 256)]
LATENT = [(2, 1, 576), (17, 1, 576)]
FAR_NUMBERS = 2**31
"""Offsets of numbers above this do not fit into 32 bits."""


def check(heads: tuple[int, int, int], block_tokens: int, lengths: list[int], window: int | None, spare: int) -> None:
    """Compare one batch. Blocks of no request, and slots after a request's end, hold NaN. `spare`: leading blocks."""
    count, kv_heads, head_dim = heads
    rope_dim = 64 if head_dim == 576 else 0
    layout = KVLayout(layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens,
                      dtype="float32", planes=1 if rope_dim else 2)  # fmt: skip
    sizes = [-(-length // block_tokens) for length in lengths]
    memory = torch.empty(layout.block_bytes * (spare + sum(sizes) + 1), dtype=torch.uint8)
    memory[layout.block_bytes * spare :] = 255  # NaN. Leading blocks are never touched, so they take no memory
    kv = PagedKV(memory, layout)
    tables = [table + spare for table in torch.randperm(sum(sizes)).split(sizes)]
    rows = [Row(index, 1, length - 1, table) for index, (length, table) in enumerate(zip(lengths, tables, strict=True))]
    for row in rows:
        for position in range(row.total):
            block, slot = row.blocks[position // block_tokens], position % block_tokens
            kv.data[block, :, :, slot] = torch.randn(LAYERS, layout.planes, kv_heads, head_dim)
    queries = torch.randn(len(rows), count, head_dim)
    foreign = spare + sum(sizes)  # a block of no request fills the tables
    blocks = torch.full((len(rows), max(1, *sizes) + 1), foreign, dtype=torch.int32)
    for index, table in enumerate(tables):
        blocks[index, : len(table)] = table
    plan = TritonDecodeKernel(products=torch.float32, rope_dim=rope_dim).plan(
        DecodeTables(blocks, torch.tensor(lengths, dtype=torch.int32)), kv
    )
    mine = plan.run(1, queries, window).view(queries.shape)[..., : head_dim - rope_dim]
    real = [row for row in rows if row.total]
    expected = ReferenceBackend().plan(real, kv).run(1, queries, window).view(queries.shape)
    for row in rows:
        wanted = expected[row.first, :, : head_dim - rope_dim] if row.total else torch.zeros_like(mine[row.first])
        torch.testing.assert_close(mine[row.first], wanted, atol=TOLERANCE, rtol=TOLERANCE)


def run(examples: int) -> None:
    """Compare this many batches, and one beyond 32-bit offsets. Print the number of batches that were equal."""
    done = 0

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(
        heads=st.sampled_from(GROUPED + LATENT),
        block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
        lengths=st.lists(st.sampled_from([0, 1, 7, 8, 33, 128, 129, 511, 513]), min_size=1, max_size=3),
        window=st.sampled_from([None, 1, 30, 512]),
    )
    def equal(heads: tuple[int, int, int], block_tokens: int, lengths: list[int], window: int | None) -> None:
        nonlocal done
        torch.manual_seed(5)
        if any(lengths):
            check(heads, block_tokens, lengths, window if heads[2] != 576 else None, 0)
            done += 1

    equal()
    block_numbers = LAYERS * 2 * 128 * 2 * 64
    check((4, 2, 64), 128, [40, 0, 130], None, FAR_NUMBERS // block_numbers + 1)
    print(f"equal: {done + 1}")
