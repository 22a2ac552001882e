"""Launch the Triton kernels for the operations of a layer between its matrix products."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from baton.compute.torch.kernels.layer_ops import HeadNorms, NewTokens
from baton.compute.triton.layer_kernels import (
    add_norm_kernel,
    gate_kernel,
    rotate_and_write_kernel,
    write_rows_kernel,
)

GATE_TILE = 1024
"""Numbers of a row that one program of the gate computes."""


class TritonOps:
    """Implements `LayerOps` with one launch for each operation. Tokens whose slot is -1 write no KV."""

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        hidden, out = hidden.contiguous(), torch.empty_like(hidden)
        summed = hidden if added is None else torch.empty_like(hidden)
        tokens, size = hidden.shape
        add_norm_kernel[(tokens,)](
            hidden, hidden if added is None else added.contiguous(), weight, summed, out, eps,
            SIZE=size, SIZE_PAD=triton.next_power_of_2(size), ADDS=added is not None, num_warps=_warps(size),
        )  # fmt: skip
        return out, summed

    def rotate_and_write(self, qkv: Tensor, layer: int, new: NewTokens, norms: HeadNorms | None) -> Tensor:
        qkv, kv = qkv.contiguous(), new.kv
        tokens, vectors, dim = qkv.shape
        heads = vectors - 2 * kv.layout.kv_heads
        queries = qkv.new_empty(tokens, heads, dim)
        q_norm, k_norm, eps = (norms.queries, norms.keys, norms.eps) if norms is not None else (qkv, qkv, 0.0)
        rotate_and_write_kernel[(tokens, vectors)](
            qkv, new.cos, new.sin, new.slots, queries, kv.token_rows, kv.token_scales, q_norm, k_norm, eps,
            kv.first_row(layer), kv.first_row(layer, 1),
            HEADS=heads, KV_HEADS=kv.layout.kv_heads, DIM=dim, DIM_PAD=triton.next_power_of_2(dim),
            NORMS=norms is not None, CELL=kv.cell, E4M3=kv.layout.dtype == "fp8", num_warps=1,
        )  # fmt: skip
        return queries

    def write_latents(self, latents: Tensor, layer: int, new: NewTokens) -> None:
        (tokens, width), kv = latents.shape, new.kv
        write_rows_kernel[(tokens,)](
            latents.contiguous(), new.slots, kv.token_rows, kv.token_scales, kv.first_row(layer),
            WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width), CELL=kv.cell, E4M3=kv.layout.dtype == "fp8",
            num_warps=4,
        )  # fmt: skip

    def gate(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, size)
        gate_kernel[(tokens, -(-size // GATE_TILE))](gate_up, out, size, SIZE_TILE=GATE_TILE, num_warps=4)
        return out


def _warps(size: int) -> int:
    """Return the warps of a program that keeps a row of this size in registers, 32 numbers per thread at most."""
    return min(16, max(1, triton.next_power_of_2(size) // 1024))
