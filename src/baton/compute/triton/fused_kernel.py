"""The Triton kernel for a layer's attention in a step of chunks and decoding requests, in one launch.

Chunks are limited by arithmetic, decoding by memory, so a multiprocessor that has both at a time is busy in both. Each
program takes tickets of its multiprocessor, which alternate between tiles of chunks and items of decoding requests in
the ratio of their numbers: so both lists end at about the same time. A program waits for no other one.
Source: POD-Attention (arXiv 2410.18038), section 4, here with programs that take work until there is none.
"""

# ruff: noqa: ANN001, ANN201, PLR0913 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl
from triton.language.extra import cuda

from baton.compute.triton.chunk_kernel import attend_tile
from baton.compute.triton.persistent_kernel import decode_item


@triton.jit
def take_work(counters, tiles_total, items_total, POOLS: tl.constexpr):
    """Take a ticket of this multiprocessor. Return the number of a tile, tiles_total + that of an item, or their sum.

    counters: tickets of each pool, then the tiles and the items that were taken. The sum, or more: all were taken.
    """
    pool = 0
    if POOLS > 1:
        pool = cuda.smid() % POOLS
    ticket = tl.atomic_add(counters + pool, 1, sem="relaxed").to(tl.int64)
    all_work = tiles_total + items_total
    work = all_work
    if ticket * tiles_total % all_work < tiles_total:
        work = tl.atomic_add(counters + POOLS, 1, sem="relaxed")
        if work >= tiles_total:
            work = tiles_total + tl.atomic_add(counters + POOLS + 1, 1, sem="relaxed")
    else:
        work = tiles_total + tl.atomic_add(counters + POOLS + 1, 1, sem="relaxed")
        if work >= all_work:
            tile = tl.atomic_add(counters + POOLS, 1, sem="relaxed")
            work = tl.where(tile < tiles_total, tile, all_work)
    return work


@triton.jit(do_not_specialize=["first_row", "window", "table_width", "splits", "tiles_total"])
def fused_kernel(
    queries, kv, scales, blocks, tiles, rows, lengths, counts, items, counters, parts, sums, out, first_row, scale_log2,
    window, table_width, splits, tiles_total,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    CELL: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr,
    DOT: tl.constexpr, QUERIES: tl.constexpr, TILE_KEYS: tl.constexpr, POOLS: tl.constexpr,
) -> None:  # fmt: skip
    """Take work until there is none. Arguments as of `chunk_kernel` and `persistent_kernel`.

    blocks: tables of the decoding requests, then those of the chunks. rows: of the decoding requests in the step.
    tiles_total: tiles times query heads. counters: as of `take_work`, then the programs that have ended, then
    `arrivals` of `decode_item`. All are 0 between launches. POOLS: pools of tickets, a power of two. A multiprocessor
    has its own if there are as many. 1: all programs share one.
    """
    heads: tl.constexpr = GROUP * KV_HEADS
    items_total = tl.load(counts)
    work = take_work(counters, tiles_total, items_total, POOLS)
    while work < tiles_total + items_total:
        if work < tiles_total:
            attend_tile(
                tiles + (work // heads).to(tl.int64) * 4, work % heads, queries, kv, scales, blocks, out, first_row,
                scale_log2, window, table_width, heads, GROUP, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_ROWS, CELL, E4M3,
                QUERIES, TILE_KEYS, DOT,
            )  # fmt: skip
        else:
            decode_item(
                items + (work - tiles_total).to(tl.int64) * 4, rows, queries, kv, scales, blocks, lengths, counts,
                counters + POOLS + 3, parts, sums, out, first_row, scale_log2, window, table_width, splits, GROUP,
                KV_HEADS, DIM, DIM_PAD, ROPE, ROPE_PAD, LATENT, BLOCK_TOKENS, BLOCK_ROWS, CELL, SPLIT, KEYS, HEADS,
                E4M3, DOT,
            )  # fmt: skip
        work = take_work(counters, tiles_total, items_total, POOLS)
    ended = tl.atomic_add(counters + POOLS + 2, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        tl.store(counters + tl.arange(0, POOLS), tl.zeros([POOLS], tl.int32))
        tl.store(counters + POOLS, 0)
        tl.store(counters + POOLS + 1, 0)
        tl.store(counters + POOLS + 2, 0)
