"""Triton kernels for decode attention in one launch: programs take work from a queue until it is empty.

`schedule_kernel` writes the queue once per step, longest work first. `persistent_kernel` runs once per layer. The last
program that finishes a head tile of a request merges its splits, so no program waits for another, and a launch of any
number of programs ends. Counters return to zero at the end of a launch. Splits lie at the same positions as in
`kernels`, and are merged in the same order.
Sources: FlashMLA's split plan; ThunderMLA (Spector et al., 2025) for one launch, here without its spinning.
"""

# ruff: noqa: ANN001, ANN201, PLR0913 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl

from baton.compute.triton.kernels import attend_split, load_queries


@triton.jit(do_not_specialize=["requests", "window", "items_wanted"])
def schedule_kernel(
    lengths, counts, items, requests, window, items_wanted,
    TILES: tl.constexpr, TILES_PAD: tl.constexpr, SPLIT: tl.constexpr, REQUESTS_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Write one request's items of work: (request, head tile, first split, split after the last).

    counts: the number of items, then each request's items per head tile. An item is a run of splits of equal size for
    all requests, so that there are about items_wanted. Full runs come first, then each request's last run, longest
    first: a program that is late by one item is late by a short one.
    """
    me = tl.program_id(0)
    index = tl.arange(0, REQUESTS_PAD)
    exists = index < requests
    length = tl.load(lengths + index, mask=exists, other=0)
    first = tl.maximum(length - window, 0) // SPLIT
    splits = (length + SPLIT - 1) // SPLIT - first
    run = tl.maximum(tl.sum(splits, 0) * TILES // items_wanted, 1)
    runs = tl.where(exists, tl.maximum((splits + run - 1) // run, 1), 0)  # an empty request has an empty run
    full = tl.where(exists, runs - 1, 0)
    rest = length - (first + full * run) * SPLIT  # keys of the last run
    mine = index == me
    my_first, my_full = tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, full, 0), 0)
    my_rest, my_end = tl.sum(tl.where(mine, rest, 0), 0), tl.sum(tl.where(mine, first + splits, 0), 0)
    tile = tl.arange(0, TILES_PAD)
    start = tl.sum(tl.where(index < me, full, 0), 0) * TILES
    for number in range(my_full + 1):
        if number == my_full:
            before = exists & ((rest > my_rest) | ((rest == my_rest) & (index < me)))
            start = (tl.sum(full, 0) + tl.sum(before.to(tl.int32), 0)) * TILES
        place = items + (start + tile) * 4
        split = my_first + number * run
        tl.store(place, me + tile * 0, mask=tile < TILES)
        tl.store(place + 1, tile, mask=tile < TILES)
        tl.store(place + 2, split + tile * 0, mask=tile < TILES)
        tl.store(place + 3, tl.minimum(split + run, my_end) + tile * 0, mask=tile < TILES)
        start += TILES
    tl.store(counts + 1 + me, my_full + 1)
    if me == 0:
        tl.store(counts, tl.sum(runs, 0) * TILES)


@triton.jit
def merge_tile(
    parts, sums, out, head, real, first, count, splits,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, OUT_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the splits [first, count) of some heads, in order.

    Other programs have written them, so the loads (.cg) bypass this processor's L1 cache, which may be stale.
    """
    dim = tl.arange(0, DIM_PAD)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    for split in range(first, count):
        found = tl.load(sums + head * splits + split, mask=real, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(peak, found)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, DIM_PAD], tl.float32)
    inside = real[:, None] & (dim[None, :] < DIM)
    for split in range(first, count):
        place = head * splits + split
        weight = tl.exp2(tl.load(sums + place, mask=real, other=0.0, cache_modifier=".cg") - peak)
        total += weight
        part = parts + place[:, None] * DIM + dim[None, :]
        summed += weight[:, None] * tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
    mean = summed / tl.where(total > 0, total, 1.0)[:, None]  # a request without keys gets zeros
    tl.store(out + head[:, None] * OUT_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def item_heads(item, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """Return the request and the head tile of an item, their query heads [HEADS], and which of these exist.

    Each call reads the item again, so that registers need not keep the result during the loop over keys.
    """
    token, tile = tl.load(item, volatile=True).to(tl.int64), tl.load(item + 1, volatile=True)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    in_group = (tile % tiles) * HEADS + tl.arange(0, HEADS)
    return token, tile, (token * KV_HEADS + tile // tiles) * GROUP + in_group, in_group < GROUP


@triton.jit
def row_offset(rows, request, WIDTH: tl.constexpr):
    """Return the distance of a request's row in a step from row number `request`, in numbers. WIDTH: of a row.

    rows: the rows of a step's decoding requests. None: the step has no other rows.
    """
    offset = request * 0
    if rows is not None:
        offset = (tl.load(rows + request, volatile=True).to(tl.int64) - request) * WIDTH
    return offset


@triton.jit
def decode_item(
    item, rows, queries, kv, scales, blocks, lengths, counts, arrivals, parts, sums, out, first_row, scale_log2,
    window, table_width, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    CELL: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Attend to the splits of one item. If it is the last one of its request and head tile, merge them all.

    rows: see `row_offset`. arrivals: finished items of each request and head tile. The merging program sets its count
    back to 0.
    """
    width: tl.constexpr = KV_HEADS * GROUP * (DIM + ROPE)
    token, tile, head, real = item_heads(item, GROUP, KV_HEADS, HEADS)
    first_split, end_split = tl.load(item + 2), tl.load(item + 3)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    length = tl.load(lengths + token)
    visible = tl.maximum(length - window, 0)
    query = queries + row_offset(rows, token, width) + head * (DIM + ROPE)
    q = load_queries(query, real, DIM, DIM_PAD, 0, E4M3, DOT)
    q_rope = q
    if ROPE > 0:
        q_rope = load_queries(query, real, ROPE, ROPE_PAD, DIM, E4M3, DOT)
    dim = tl.arange(0, DIM_PAD)
    for split in range(first_split, end_split):
        start = split * SPLIT
        mean, log_sum = attend_split(
            q, q_rope, kv, scales, blocks + token * table_width, start, tl.minimum(start + SPLIT, length), visible,
            first_row, tile // tiles * CELL, scale_log2, KV_HEADS, CELL, DIM, DIM_PAD, ROPE, ROPE_PAD, LATENT,
            BLOCK_TOKENS, BLOCK_ROWS, KEYS, HEADS, E4M3, DOT,
        )  # fmt: skip
        _, _, summed_head, summed = item_heads(item, GROUP, KV_HEADS, HEADS)
        place = summed_head * splits + split
        tl.store(parts + place[:, None] * DIM + dim[None, :], mean, mask=summed[:, None] & (dim[None, :] < DIM))
        tl.store(sums + place, log_sum, mask=summed)
    token, tile, head, real = item_heads(item, GROUP, KV_HEADS, HEADS)
    tl.debug_barrier()  # every thread has stored its numbers before one thread publishes them
    count = arrivals + token * KV_HEADS * tiles + tile
    arrived = tl.atomic_add(count, 1, sem="acq_rel")
    if arrived == tl.load(counts + 1 + token) - 1:
        tl.debug_barrier()
        end = (length + SPLIT - 1) // SPLIT
        merge_tile(
            parts, sums, out + row_offset(rows, token, width), head, real, visible // SPLIT, end, splits, DIM, DIM_PAD,
            DIM + ROPE, HEADS,
        )  # fmt: skip
        tl.store(count, 0)


@triton.jit(do_not_specialize=["first_row", "window", "table_width", "splits"])
def persistent_kernel(
    queries, kv, scales, blocks, lengths, counts, items, counters, parts, sums, out, first_row, scale_log2, window,
    table_width, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    CELL: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr,
    DOT: tl.constexpr,
) -> None:  # fmt: skip
    """Take items from the queue until it is empty. Arguments as of `split_kernel`, outputs as of `merge_kernel`.

    counters: the next item, the programs that have ended, then `arrivals` of `decode_item`. All are 0 between launches.
    """
    items_total = tl.load(counts)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < items_total:
        decode_item(
            items + ticket.to(tl.int64) * 4, None, queries, kv, scales, blocks, lengths, counts, counters + 2, parts,
            sums, out, first_row, scale_log2, window, table_width, splits, GROUP, KV_HEADS, DIM, DIM_PAD, ROPE,
            ROPE_PAD, LATENT, BLOCK_TOKENS, BLOCK_ROWS, CELL, SPLIT, KEYS, HEADS, E4M3, DOT,
        )  # fmt: skip
        ticket = tl.atomic_add(counters, 1, sem="relaxed")
    ended = tl.atomic_add(counters + 1, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)
