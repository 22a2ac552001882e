"""Triton kernels: paged attention of decode steps (splits of each request, then their merge), and experts.

They also run on CPU tensors with TRITON_INTERPRET=1, but with products in float32 only, because the interpreter
multiplies the bit patterns of bfloat16 numbers (triton-lang/triton issue 11584). So the type
of products is a parameter.
Numbers that differ between steps and layers are not specialized, so every step runs the binaries of the warm-up.
Sources: FlashAttention-2 (arXiv 2307.08691) for the loop, Flash-Decoding (Dao et al., 2023) for the splits.
"""

# ruff: noqa: ANN001, PLR0913, PLR0915 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_row", "window", "table_width", "splits"])
def split_kernel(
    queries, kv, blocks, lengths, parts, sums, first_row, scale_log2, window, table_width, splits, row_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DOT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to one split of one request. Write its normalized sum to parts, its base-2 log-sum-exp to sums.

    DIM: the dimensions of a head, or of the latent vector without its ROPE dimensions. BLOCK_ROWS: the token rows of a
    block over all layers and planes. first_row: the first row of this layer in a block. row_stride: the numbers of one
    token row.
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
    dim = tl.arange(0, DIM_PAD)
    width: tl.constexpr = DIM + ROPE
    query = queries + (token * KV_HEADS * GROUP + head[:, None]) * width
    q = tl.load(query + dim[None, :], mask=real[:, None] & (dim[None, :] < DIM), other=0.0).to(DOT)
    rope = tl.arange(0, ROPE_PAD)
    if ROPE > 0:
        q_rope = tl.load(query + DIM + rope[None, :], mask=real[:, None] & (rope[None, :] < ROPE), other=0.0).to(DOT)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sums_of_values = tl.zeros([HEADS, DIM_PAD], tl.float32)
    index = tl.arange(0, KEYS)
    table = blocks + token * table_width
    block = tl.load(table + (start + index) // BLOCK_TOKENS, mask=start + index < end, other=0)
    for first in range(start, end, KEYS):
        position = first + index
        seen = (position < end) & (position >= visible)
        row = block.to(tl.int64) * BLOCK_ROWS + first_row + position % BLOCK_TOKENS
        # Loaded a pass ahead, so that the compiler can copy the keys of the next pass during this one.
        block = tl.load(table + (position + KEYS) // BLOCK_TOKENS, mask=position + KEYS < end, other=0)
        key = kv + row[:, None] * row_stride + kv_head * width
        stored = seen[:, None] & (dim[None, :] < DIM)
        k = tl.load(key + dim[None, :], mask=stored, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(key + DIM + rope[None, :], mask=seen[:, None] & (rope[None, :] < ROPE), other=0.0).to(DOT)
            scores += tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key seen yet: -inf - -inf would be NaN
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(peak - base)
        if LATENT:
            v = k
        else:
            value = key + BLOCK_TOKENS * row_stride
            v = tl.load(value + dim[None, :], mask=stored, other=0.0).to(DOT)
        sums_of_values = sums_of_values * decay[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        peak = higher
    place = (token * KV_HEADS * GROUP + head) * splits + split
    whole = real[:, None] & (dim[None, :] < DIM)
    tl.store(parts + place[:, None] * DIM + dim[None, :], sums_of_values / total[:, None], mask=whole)
    tl.store(sums + place, peak + tl.log2(total), mask=real)


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
