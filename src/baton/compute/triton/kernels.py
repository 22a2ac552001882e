"""Triton kernels: paged attention of decode steps (splits of each request, then their merge), and experts.

They also run on CPU tensors with TRITON_INTERPRET=1, but with products in float32 only, because the interpreter
multiplies the bit patterns of bfloat16 numbers (triton-lang/triton issue 11584). So the type
of products is a parameter.
Numbers that differ between steps and layers are not specialized, so every step runs the binaries of the warm-up.
Sources: FlashAttention-2 (arXiv 2307.08691) for the loop, Flash-Decoding (Dao et al., 2023) for the splits.
"""

# ruff: noqa: ANN001, ANN201, PLR0913 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl


@triton.jit
def load_numbers(place, mask, E4M3: tl.constexpr, DOT: tl.constexpr):
    """Load KV in the type of products. E4M3: each code is shifted into the bits of a float16, 2^-8 times its number."""
    stored = tl.load(place, mask=mask, other=0)
    if E4M3:
        code = stored.to(tl.uint16)
        stored = (((code & 0x7F) << 7) | ((code & 0x80) << 8)).to(tl.float16, bitcast=True)
    return stored.to(DOT)


@triton.jit
def load_scale(scales, place, mask):
    """Load scales of e4m3 cells, times the 2^8 that `load_numbers` leaves out. place: byte offsets of the scales."""
    return tl.load(scales + place // 4, mask=mask, other=0.0) * 256.0


@triton.jit
def load_queries(
    query, real, DIM: tl.constexpr, DIM_PAD: tl.constexpr, FIRST: tl.constexpr, E4M3: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Load dimensions [FIRST, FIRST + DIM) of the query heads at these places, as `products_of` takes them.

    That is [HEADS, DIM_PAD], or [DIM_PAD, HEADS] for E4M3 with products in float32.
    """
    dim = tl.arange(0, DIM_PAD)
    if E4M3 and tl.float32 == DOT:
        place, inside = query[None, :] + FIRST + dim[:, None], real[None, :] & (dim[:, None] < DIM)
    else:
        place, inside = query[:, None] + FIRST + dim[None, :], real[:, None] & (dim[None, :] < DIM)
    return tl.load(place, mask=inside, other=0.0).to(DOT)


@triton.jit
def products_of(q, k, E4M3: tl.constexpr, DOT: tl.constexpr):
    """Return the products of queries and keys: [HEADS, KEYS].

    In float32, keys decoded from fp8 come first: a barrier precedes their loads from shared memory, and queries loaded
    before it would take a register for each dimension.
    """
    if E4M3 and tl.float32 == DOT:
        products = tl.trans(tl.dot(k, q, input_precision="ieee"))
    else:
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
    return products


@triton.jit
def attend_split(
    q, q_rope, kv, scales, table, start, end, visible, first_row, head_place, scale_log2,
    KV_HEADS: tl.constexpr, CELL: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    KEYS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return the normalized sum [HEADS, DIM_PAD] of the values of keys [start, end), and its base-2 log-sum-exp.

    visible: the first key within the window. head_place: the first number of the KV head in a token row.
    """
    dim, rope, index = tl.arange(0, DIM_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, KEYS)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, DIM_PAD], tl.float32)
    block = tl.load(table + (start + index) // BLOCK_TOKENS, mask=start + index < end, other=0)
    for first in range(start, end, KEYS):
        position = first + index
        seen = (position < end) & (position >= visible)
        row = block.to(tl.int64) * BLOCK_ROWS + first_row + position % BLOCK_TOKENS
        # Loaded a pass ahead, so that the compiler can copy the keys of the next pass during this one.
        block = tl.load(table + (position + KEYS) // BLOCK_TOKENS, mask=position + KEYS < end, other=0)
        cell = row * (KV_HEADS * CELL) + head_place
        stored = seen[:, None] & (dim[None, :] < DIM)
        k = load_numbers(kv + cell[:, None] + dim[None, :], stored, E4M3, DOT)
        scores = products_of(q, k, E4M3, DOT)
        if ROPE > 0:
            place = kv + cell[:, None] + DIM + rope[None, :]
            k_rope = load_numbers(place, seen[:, None] & (rope[None, :] < ROPE), E4M3, DOT)
            scores += products_of(q_rope, k_rope, E4M3, DOT)
        if E4M3:
            key_scale = load_scale(scales, cell + DIM + ROPE, seen)
            scores *= key_scale[None, :]
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: -inf - -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        scaled = weights
        if LATENT:
            v = k
            if E4M3:
                scaled *= key_scale[None, :]
        else:
            value = cell + BLOCK_TOKENS * KV_HEADS * CELL
            v = load_numbers(kv + value[:, None] + dim[None, :], stored, E4M3, DOT)
            if E4M3:
                scaled *= load_scale(scales, value + DIM, seen)[None, :]
        summed = summed * decay[:, None] + tl.dot(scaled.to(DOT), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    return summed / total[:, None], peak + tl.log2(total)


@triton.jit(do_not_specialize=["first_row", "window", "table_width", "splits"])
def split_kernel(
    queries, kv, scales, blocks, lengths, parts, sums, first_row, scale_log2, window, table_width, splits,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    CELL: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, E4M3: tl.constexpr,
    DOT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to one split of one request. Write its normalized sum to parts, its base-2 log-sum-exp to sums.

    DIM: the dimensions of a head, or of the latent vector without its ROPE dimensions. BLOCK_ROWS: the token rows of a
    block over all layers and planes. first_row: the first row of this layer in a block. CELL: the numbers of a KV head
    in a row. With E4M3 they are bytes, scale included, and `scales` is the same memory as float32.
    """
    token = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles
    in_group = (tl.program_id(1) % tiles) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    length = tl.load(lengths + token)
    visible = tl.maximum(length - window, 0)
    start = split * SPLIT
    end = tl.minimum(start + SPLIT, length)
    if (start >= length) | (end <= visible):
        return
    head = kv_head * GROUP + in_group
    real = in_group < GROUP
    query = queries + (token * KV_HEADS * GROUP + head) * (DIM + ROPE)
    q = load_queries(query, real, DIM, DIM_PAD, 0, E4M3, DOT)
    q_rope = q
    if ROPE > 0:
        q_rope = load_queries(query, real, ROPE, ROPE_PAD, DIM, E4M3, DOT)
    mean, log_sum = attend_split(
        q, q_rope, kv, scales, blocks + token * table_width, start, end, visible, first_row, kv_head * CELL,
        scale_log2, KV_HEADS, CELL, DIM, DIM_PAD, ROPE, ROPE_PAD, LATENT, BLOCK_TOKENS, BLOCK_ROWS, KEYS, HEADS, E4M3,
        DOT,
    )  # fmt: skip
    first = (token * KV_HEADS + kv_head) * GROUP * splits + split
    place = in_group * splits
    dim = tl.arange(0, DIM_PAD)
    tl.store(parts + first * DIM + place[:, None] * DIM + dim[None, :], mean, mask=real[:, None] & (dim[None, :] < DIM))
    tl.store(sums + first + place, log_sum, mask=real)


@triton.jit(do_not_specialize=["window", "splits"])
def merge_kernel(
    parts, sums, lengths, out, window, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, OUT_DIM: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the splits of one head of one request, in order."""
    token = tl.program_id(0).to(tl.int64)
    place = token * HEADS + tl.program_id(1)
    length = tl.load(lengths + token)
    first = tl.maximum(length - window, 0) // SPLIT
    count = (length + SPLIT - 1) // SPLIT
    dim = tl.arange(0, DIM_PAD)
    peak = float("-inf")
    for split in range(first, count):
        peak = tl.maximum(peak, tl.load(sums + place * splits + split))
    total = 0.0
    summed = tl.zeros([DIM_PAD], tl.float32)
    for split in range(first, count):
        weight = tl.exp2(tl.load(sums + place * splits + split) - peak)
        total += weight
        summed += weight * tl.load(parts + (place * splits + split) * DIM + dim, mask=dim < DIM, other=0.0)
    mean = summed / tl.where(count > first, total, 1.0)  # a request without keys gets zeros
    tl.store(out + place * OUT_DIM + dim, mean.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def expert_rows_kernel(
    rows, weights, experts, out, inputs, outputs, repeat,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row with OUTPUTS rows of its expert's matrix in float32, INPUTS numbers at a time."""
    product = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    matrix = weights + tl.load(experts + product) * outputs * inputs
    summed = tl.zeros([OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        place = first + tl.arange(0, INPUTS)
        row = tl.load(rows + (product // repeat) * inputs + place, mask=place < inputs, other=0.0).to(tl.float32)
        inside = (output[:, None] < outputs) & (place[None, :] < inputs)
        cell = output[:, None].to(tl.int64) * inputs + place[None, :]
        summed += tl.sum(tl.load(matrix + cell, mask=inside, other=0.0).to(tl.float32) * row[None, :], 1)
    tl.store(out + product * outputs + output, summed.to(out.dtype.element_ty), mask=output < outputs)
