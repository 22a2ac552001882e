"""Random batches in Triton's interpreter against the formula (hypothesis), for `triton_cases`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.compute.decode_sizes import SPLIT_TOKENS
from baton.compute.torch.kernels.paged_decode import DecodeTables
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.reference import ReferenceBackend
from baton.compute.triton.fused import FLOP_PER_BYTE, FusedBackend, items_wanted
from baton.compute.triton.fused_kernel import take_work
from baton.compute.triton.launch import NO_WINDOW, Tile, TritonDecodeKernel
from baton.compute.triton.persistent import ITEMS_PER_PROGRAM, PersistentDecodeKernel, schedule
from baton.decide.kv.layout import KVDtype, KVLayout
from tests.attention_cases import compare

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
    splits_max, wanted = max(end for _, end in spans), programs * ITEMS_PER_PROGRAM
    found = schedule(torch.tensor(lengths, dtype=torch.int32), tiles, splits_max, window, wanted)
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
    assert longest <= max(1, work // wanted)


@triton.jit
def work_kernel(counters, tiles_total, items_total, taken) -> None:
    """Write the work that one program takes to taken, in its order."""
    work = take_work(counters, tiles_total, items_total, 1)
    while work < tiles_total + items_total:
        tl.store(taken, work)
        taken += 1
        work = take_work(counters, tiles_total, items_total, 1)


def check_tickets(tiles: int, items: int, ticket: int) -> None:
    """All work is taken once, each kind in its order, from any ticket on. From ticket 0 on, both kinds keep pace."""
    room = torch.full((3 * (tiles + items),), -1, dtype=torch.int32)
    work_kernel[(1,)](torch.tensor([ticket, 0, 0, 0], dtype=torch.int32), tiles, items, room)
    taken = room[: tiles + items]
    assert bool((room[tiles + items :] == -1).all())
    assert [work for work in taken.tolist() if work < tiles] == list(range(tiles))
    assert [work for work in taken.tolist() if work >= tiles] == list(range(tiles, tiles + items))
    ahead = torch.arange(1, tiles + items + 1) * tiles - (taken < tiles).cumsum(0) * (tiles + items)
    assert ticket or bool((ahead.abs() <= tiles + items).all())


def check_item_size(contexts: list[int], chunk_end: int, queries: int) -> None:
    """The items of a mixed step take between half as long as a tile and as long, if they are longer than a split."""
    layout = KVLayout(layers=2, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    tiles = [Tile(0, chunk_end - queries, queries, 0)]
    wanted = items_wanted(tiles, queries, contexts, NO_WINDOW, layout)
    counts = schedule(torch.tensor(contexts, dtype=torch.int32), 8, 128, NO_WINDOW, wanted)
    longest = max(end - first for _, _, first, end in counts.items[: int(counts.counts[0])].tolist())
    item_s = longest * SPLIT_TOKENS * 512 * FLOP_PER_BYTE  # in units of a FLOP's time
    tile_s = 4 * 128 * queries * chunk_end
    assert longest == 1 or item_s <= tile_s
    assert longest == max(contexts) // SPLIT_TOKENS or item_s > tile_s / 2


def run(examples: int) -> None:
    """Compare this many batches of each kind, and one beyond 32-bit offsets. Print how many were equal."""
    mixed_steps(examples)
    decode_steps(examples)


def mixed_steps(examples: int) -> None:
    """Chunks and decoding requests in one launch."""

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(
        heads=st.sampled_from(GROUPED),
        block_tokens=st.sampled_from([8, 16, 32, 64, 128]),
        sizes=st.tuples(
            st.tuples(st.just(1), st.sampled_from([0, 7, 32, 129, 511, 513])),
            st.tuples(st.sampled_from([2, 17, 40]), st.sampled_from([0, 5, 64, 130])),
            st.tuples(st.sampled_from([1, 1, 3]), st.integers(0, 40)),
        ).flatmap(st.permutations),
        window=st.sampled_from([None, 1, 30, 512]),
        dtype=st.sampled_from(["float32", "fp8", "bfloat16"]),
    )
    def equal(
        heads: tuple[int, int, int], block_tokens: int, sizes: list[tuple[int, int]], window: int | None, dtype: KVDtype
    ) -> None:
        count, kv_heads, head_dim = heads
        layout = KVLayout(
            layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, dtype=dtype
        )  # fmt: skip
        compare(FusedBackend(TritonDecodeKernel(torch.float32), programs=3), sizes, layout, count, window)

    @settings(max_examples=2 * examples, deadline=None, derandomize=True, database=None)
    @given(tiles=st.integers(1, 40), items=st.integers(1, 40), ticket=st.integers(0, 80))
    def taken(tiles: int, items: int, ticket: int) -> None:
        check_tickets(tiles, items, ticket)
        check_tickets(tiles, items, 0)

    @settings(max_examples=4 * examples, deadline=None, derandomize=True, database=None)
    @given(
        contexts=st.lists(st.integers(1, 64).map(lambda splits: splits * SPLIT_TOKENS), min_size=1, max_size=9),
        chunk_end=st.integers(64, 60_000),
    )
    def sized(contexts: list[int], chunk_end: int) -> None:
        check_item_size(contexts, chunk_end, 64)

    equal()
    taken()
    sized()


def decode_steps(examples: int) -> None:
    """Splits of decoding requests, in two launches and in one."""
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
