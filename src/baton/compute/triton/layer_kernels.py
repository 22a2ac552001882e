"""Triton kernels for the operations of a layer between its matrix products. Each computes in float32.

One program computes one row or one head, so a token's result does not depend on the batch.
"""

# ruff: noqa: ANN001, ANN201, PLR0913 (the arguments of a kernel are many, and have no types)
import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    hidden, added, weight, summed, out, eps,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ADDS: tl.constexpr,
) -> None:  # fmt: skip
    """Write hidden + added to summed, and its root-mean-square norm to out. Source: arXiv 1910.07467."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, SIZE_PAD)
    inside = place < SIZE
    value = tl.load(hidden + row + place, mask=inside, other=0.0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(added + row + place, mask=inside, other=0.0)).to(value.dtype)
        tl.store(summed + row + place, value, mask=inside)
    number = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, 0) / SIZE + eps)
    normal = number * scale * tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + place, normal.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_cell(kv, scales, place, value, dim, inside, DIM: tl.constexpr, E4M3: tl.constexpr):
    """Store one head at its place in the cache. E4M3: as codes, then a scale, with the same bits as `kernels.e4m3`."""
    if E4M3:
        value = tl.where(value == value, value, 0.0)
        most = tl.max(tl.abs(value), 0)
        most = tl.where(most < 1e38, most, 0.0)
        scaled = value * tl.where(most > 0, tl.div_rn(448.0, tl.where(most > 0, most, 1.0)), 0.0)
        scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -448.0), 448.0), 0.0)
        size = tl.abs(scaled)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)  # to nearest, ties to even, below 2^-6
        code = tl.minimum(tl.where(bits < 0x3C800000, small, normal), 0x7E) | tl.where(scaled < 0, 0x80, 0)
        tl.store(kv + place + dim, code.to(tl.uint8), mask=inside)
        tl.store(scales + (place + DIM) // 4, tl.div_rn(most, 448.0))
    else:
        tl.store(kv + place + dim, value.to(kv.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(gate_up, out, size, SIZE_TILE: tl.constexpr) -> None:
    """Write silu(gate) * up. Source: GLU variants (arXiv 2002.05202)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE_TILE + tl.arange(0, SIZE_TILE)
    inside = place < size
    gate = tl.load(gate_up + row * 2 * size + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + place, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key_row", "value_row"])
def rotate_and_write_kernel(
    qkv, cos, sin, slots, queries, kv, scales, q_norm, k_norm, eps, key_row, value_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORMS: tl.constexpr,
    CELL: tl.constexpr, E4M3: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate one head of a token. Write it to queries, or to the cache unless the token is padding.

    key_row, value_row: token rows from the start of a block to this layer's keys and values. CELL: numbers of a head
    in the cache. With E4M3 they are bytes, scale included, and `scales` is the same memory as float32.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    inside = dim < DIM
    vector = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    value = tl.load(vector + dim, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        pair = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
        paired = tl.load(vector + pair, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
            if head < HEADS:
                value *= scale * tl.load(q_norm + dim, mask=inside, other=0.0).to(tl.float32)
                paired *= scale * tl.load(q_norm + pair, mask=inside, other=0.0).to(tl.float32)
            else:
                value *= scale * tl.load(k_norm + dim, mask=inside, other=0.0).to(tl.float32)
                paired *= scale * tl.load(k_norm + pair, mask=inside, other=0.0).to(tl.float32)
        angle = token * DIM + dim
        value = value * tl.load(cos + angle, mask=inside, other=0.0) + paired * tl.load(
            sin + angle, mask=inside, other=0.0
        )
    if head < HEADS:
        place = queries + (token * HEADS + head) * DIM
        tl.store(place + dim, value.to(queries.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = slot + tl.where(head < HEADS + KV_HEADS, key_row, value_row)
            place = (row * KV_HEADS + (head - HEADS) % KV_HEADS) * CELL
            store_cell(kv, scales, place, value, dim, inside, DIM, E4M3)


@triton.jit(do_not_specialize=["first_row"])
def write_rows_kernel(
    rows, slots, kv, scales, first_row,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, CELL: tl.constexpr, E4M3: tl.constexpr,
) -> None:  # fmt: skip
    """Write one token's vector to the cache, unless the token is padding. CELL, E4M3: see `rotate_and_write_kernel`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH_PAD)
    slot = tl.load(slots + token)
    if slot >= 0:
        value = tl.load(rows + token * WIDTH + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        store_cell(kv, scales, (slot + first_row) * CELL, value, place, place < WIDTH, WIDTH, E4M3)
