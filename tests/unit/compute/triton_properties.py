"""Random decode batches in Triton's interpreter against the formula (hypothesis), for `triton_cases`."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.compute.decode_sizes import SPLIT_TOKENS
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.triton.launch import NO_WINDOW, TritonDecodeKernel
from baton.compute.triton.persistent import PersistentDecodeKernel, schedule
from baton.decide.kv.layout import KVDtype, KVLayout

LAYERS = 2
TOLERANCE = 2e-4
GROUPED = [(4, 2, 64), (3, 1, 80), (8, 1, 96), (2, 2, 128), (4, 4, 192), (2, 1, 256)]
LATENT = [(2, 1, 576), (17, 1, 576)]
FAR_NUMBERS = 2**31
"""Offsets of numbers above this do not fit into 32 bits."""


def check(
    heads: tuple[int, int, int], block_tokens: int, lengths: list[int], window: int | None, spare: int,
    dtype: KVDtype = "float32",
) -> None:  # fmt: skip
    """Compare one batch. Blocks of no request, and slots after a request's end, hold NaN. `spare`: leading blocks."""
    count, kv_heads, head_dim = heads
    rope_dim = 64 if head_dim == 576 else 0
    layout = KVLayout(layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens,
                      dtype=dtype, planes=1 if rope_dim else 2)  # fmt: skip
    sizes = [-(-length // block_tokens) for length in lengths]
    memory = torch.empty(layout.block_bytes * (spare + sum(sizes) + 1), dtype=torch.uint8)
    memory[layout.block_bytes * spare :] = 255  # NaN. Leading blocks are never touched, so they take no memory
    kv = PagedKV(memory, layout)
    tables = [table + spare for table in torch.randperm(sum(sizes)).split(sizes)]
    rows = [Row(index, 1, length - 1, table) for index, (length, table) in enumerate(zip(lengths, tables, strict=True))]
    real = [row for row in rows if row.total]
    slots = kv.slots([Row(row.first, row.total, 0, row.blocks) for row in real])
    numbers = torch.randn(layout.planes, len(slots), kv_heads, head_dim)
    if rope_dim:
        kv.write_latents(1, slots, numbers[0].flatten(1))
    else:
        kv.write(1, slots, numbers[0], numbers[1])
    queries = torch.randn(len(rows), count, head_dim)
    foreign = spare + sum(sizes)  # a block of no request fills the tables
    blocks = torch.full((len(rows), max(1, *sizes) + 1), foreign, dtype=torch.int32)
    for index, table in enumerate(tables):
        blocks[index, : len(table)] = table
    tables = DecodeTables(blocks, torch.tensor(lengths, dtype=torch.int32))
    expected = ReferenceBackend().plan(real, kv).run(1, queries, window).view(queries.shape)
    for kernel in (TritonDecodeKernel(torch.float32, rope_dim), PersistentDecodeKernel(torch.float32, rope_dim)):
        mine = kernel.plan(tables, kv).run(1, queries, window).view(queries.shape)[..., : head_dim - rope_dim]
        for row in rows:
            wanted = expected[row.first, :, : head_dim - rope_dim] if row.total else torch.zeros_like(mine[row.first])
            torch.testing.assert_close(mine[row.first], wanted, atol=TOLERANCE, rtol=TOLERANCE)


def check_queue(lengths: list[int], tiles: int, window: int, programs: int) -> None:
    """Every visible split of a request is in one item of each head tile. Long items come before short ones."""
    spans = [(max(0, length - window) // SPLIT_TOKENS, -(-length // SPLIT_TOKENS)) for length in lengths]
    found = schedule(torch.tensor(lengths, dtype=torch.int32), tiles, max(end for _, end in spans), window, programs)
    items = found.items[: int(found.counts[0])].tolist()
    for request, (first, end) in enumerate(spans):
        for tile in range(tiles):
            mine = sorted(item[2:] for item in items if item[:2] == [request, tile])
            assert len(mine) == found.counts[1 + request]
            assert [split for start, stop in mine for split in range(start, stop)] == list(range(first, end))
    longest = max(stop - start for _, _, start, stop in items)
    keys = [min(stop * SPLIT_TOKENS, lengths[request]) - start * SPLIT_TOKENS for request, _, start, stop in items]
    is_last = [stop == spans[request][1] for request, _, _, stop in items]
    assert is_last == sorted(is_last)
    assert all(stop - start == longest for (_, _, start, stop), last in zip(items, is_last, strict=True) if not last)
    rest = [size for size, last in zip(keys, is_last, strict=True) if last]
    assert rest == sorted(rest, reverse=True)
    work = sum(end - first for first, end in spans) * tiles
    assert longest <= max(1, work // (programs * 16))


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
        dtype=st.sampled_from(["float32", "fp8", "bfloat16"]),
    )
    def equal(
        heads: tuple[int, int, int], block_tokens: int, lengths: list[int], window: int | None, dtype: KVDtype
    ) -> None:
        nonlocal done
        torch.manual_seed(5)
        if any(lengths):
            check(heads, block_tokens, lengths, window if heads[2] != 576 else None, 0, dtype)
            done += 1

    @settings(max_examples=4 * examples, deadline=None, derandomize=True, database=None)
    @given(
        lengths=st.lists(st.sampled_from([0, 1, 40, 511, 512, 513, 1300, 2048, 9000]), min_size=1, max_size=9),
        tiles=st.sampled_from([1, 3, 8]),
        window=st.sampled_from([NO_WINDOW, 1, 600, 2000]),
        programs=st.sampled_from([1, 2, 264]),
    )
    def scheduled(lengths: list[int], tiles: int, window: int, programs: int) -> None:
        check_queue(lengths, tiles, window, programs)

    scheduled()

    equal()
    block_numbers = LAYERS * 2 * 128 * 2 * 64
    check((4, 2, 64), 128, [40, 0, 130], None, FAR_NUMBERS // block_numbers + 1)
    print(f"equal: {done + 1}")
