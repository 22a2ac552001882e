"""The Triton kernel for the attention of prompt chunks: blocks are read in place, masks exist in registers only.

Source: FlashAttention-2 (arXiv 2307.08691).
"""

# ruff: noqa: ANN001, ANN201, PLR0913 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl

from baton.compute.triton.kernels import load_numbers, load_queries, load_scale, products_of


@triton.jit
def attend_range(
    q, peak, total, summed, kv, scales, table, query_position, first_key, end_key, first_row, head_place,
    scale_log2, window,
    ROW: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    KEYS: tl.constexpr, E4M3: tl.constexpr, DOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys [first_key, end_key), in steps of KEYS. MASKED: some query does not see some of these keys."""
    dim = tl.arange(0, DIM_PAD)
    index = tl.arange(0, KEYS)
    block = tl.load(table + (first_key + index) // BLOCK_TOKENS, mask=first_key + index < end_key, other=0)
    for first in range(first_key, end_key, KEYS):
        position = first + index
        seen = position < end_key
        row = block.to(tl.int64) * BLOCK_ROWS + first_row + position % BLOCK_TOKENS
        # Loaded a pass ahead, so that the compiler can copy the keys of the next pass during this one.
        block = tl.load(table + (position + KEYS) // BLOCK_TOKENS, mask=position + KEYS < end_key, other=0)
        key = row * ROW + head_place
        stored = seen[:, None] & (dim[None, :] < DIM)
        k = load_numbers(kv + key[:, None] + dim[None, :], stored, E4M3, DOT)
        scores = products_of(q, k, E4M3, DOT) * scale_log2
        if E4M3:
            scores *= load_scale(scales, key + DIM, seen)[None, :]
        if MASKED:
            after = query_position[:, None] - position[None, :]
            scores = tl.where(seen[None, :] & (after >= 0) & (after < window), scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: -inf - -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        value = key + BLOCK_TOKENS * ROW
        v = load_numbers(kv + value[:, None] + dim[None, :], stored, E4M3, DOT)
        if E4M3:
            weights *= load_scale(scales, value + DIM, seen)[None, :]
        summed = summed * decay[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        peak = higher
    return peak, total, summed


@triton.jit
def attend_tile(
    tile, head, queries, kv, scales, blocks, out, first_row, scale_log2, window, table_width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CELL: tl.constexpr, E4M3: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one head of one tile of queries, which are successive tokens of a request.

    tile: place of the tile's first row in the step, the position of its first token, its number of tokens, and its
    request's row in blocks. Keys are cut at multiples of KEYS from the start of the context, so the order of sums does
    not depend on the chunk.
    """
    token, start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table = blocks + tl.load(tile + 3).to(tl.int64) * table_width
    index, dim = tl.arange(0, QUERIES), tl.arange(0, DIM_PAD)
    query = queries + ((token + index) * HEADS + head) * DIM
    q = load_queries(query, index < count, DIM, DIM_PAD, 0, E4M3, DOT)
    query_position = start + index
    end = start + count
    # Three ranges: keys that a window hides from some queries, keys that every query sees, keys after some queries.
    first_key = tl.maximum(start - window + 1, 0) // KEYS * KEYS
    middle_end = tl.maximum((start + 1) // KEYS * KEYS, first_key)
    all_see = tl.minimum((tl.maximum(end - window, 0) + KEYS - 1) // KEYS * KEYS, middle_end)
    middle = tl.maximum(all_see, first_key)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    summed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    head_place = head // GROUP * CELL
    peak, total, summed = attend_range(
        q, peak, total, summed, kv, scales, table, query_position, first_key, middle, first_row, head_place,
        scale_log2, window, HEADS // GROUP * CELL, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_ROWS, KEYS, E4M3, DOT, True,
    )  # fmt: skip
    peak, total, summed = attend_range(
        q, peak, total, summed, kv, scales, table, query_position, middle, middle_end, first_row, head_place,
        scale_log2, window, HEADS // GROUP * CELL, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_ROWS, KEYS, E4M3, DOT, False,
    )  # fmt: skip
    peak, total, summed = attend_range(
        q, peak, total, summed, kv, scales, table, query_position, middle_end, end, first_row, head_place,
        scale_log2, window, HEADS // GROUP * CELL, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_ROWS, KEYS, E4M3, DOT, True,
    )  # fmt: skip
    mean = summed / tl.where(total > 0, total, 1.0)[:, None]  # rows after the tile's last token see no key
    # Read again, so that registers need not keep the places of rows during the loops.
    token, count = tl.load(tile, volatile=True).to(tl.int64), tl.load(tile + 2, volatile=True)
    place = ((token + index) * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(out + place, mean.to(out.dtype.element_ty), mask=(index[:, None] < count) & (dim[None, :] < DIM))


@triton.jit(do_not_specialize=["first_row", "window", "table_width"])
def chunk_kernel(
    queries, kv, scales, blocks, tiles, out, first_row, scale_log2, window, table_width,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CELL: tl.constexpr, E4M3: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    DOT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one head of one tile. tiles: [tiles, 4], as `attend_tile` reads each."""
    attend_tile(
        tiles + tl.program_id(0).to(tl.int64) * 4, tl.program_id(1), queries, kv, scales, blocks, out, first_row,
        scale_log2, window, table_width, HEADS, GROUP, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_ROWS, CELL, E4M3, QUERIES,
        KEYS, DOT,
    )  # fmt: skip
