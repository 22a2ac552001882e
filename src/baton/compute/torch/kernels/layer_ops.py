"""The port for the operations of a layer between its matrix products: norms, rotation, KV writes, the MLP's gate.

A GPU spends as long on a launch as on such an operation, so its implementation fuses them (`baton.compute.triton`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.compute.torch.kernels.norm import rms_norm
from baton.compute.torch.kernels.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of every query head and key head."""

    queries: Tensor  # [head_dim]
    keys: Tensor  # [head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a step: their angles, and the places of their KV."""

    cos: Tensor  # [tokens, 1, rotary_dim]
    sin: Tensor  # [tokens, 1, rotary_dim], negated in the first half
    slots: Tensor  # [tokens] int64, as `PagedKV.slots` returns them. -1: padding or of another rank, not written
    kv: PagedKV


class LayerOps(Protocol):
    """Runs the operations of a layer between its matrix products."""

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of hidden + added, and hidden + added itself: both [tokens, hidden]. None adds nothing."""
        ...

    def rotate_and_write(self, qkv: Tensor, layer: int, new: NewTokens, norms: HeadNorms | None) -> Tensor:
        """Rotate queries and keys, after their norms if there are any, and write keys and values to the cache.

        qkv: [tokens, heads + 2 * kv_heads, head_dim]. Returns the queries: [tokens, heads, head_dim].
        """
        ...

    def write_latents(self, latents: Tensor, layer: int, new: NewTokens) -> None:
        """Write one vector per token [tokens, head_dim] to the cache."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [tokens, intermediate]. gate_up: [tokens, 2 * intermediate]."""
        ...


class TorchOps:
    """Implements `LayerOps` with separate operations of torch. Does not support padding."""

    def add_norm(self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed = hidden if added is None else hidden + added
        return rms_norm(summed, weight, eps), summed

    def rotate_and_write(self, qkv: Tensor, layer: int, new: NewTokens, norms: HeadNorms | None) -> Tensor:
        kv_heads = new.kv.layout.kv_heads
        heads = qkv.shape[1] - 2 * kv_heads
        qk, values = qkv.split((heads + kv_heads, kv_heads), 1)
        if norms is not None:
            queries, keys = qk.split((heads, kv_heads), 1)
            normal = rms_norm(queries, norms.queries, norms.eps)
            qk = torch.cat((normal, rms_norm(keys, norms.keys, norms.eps)), 1)
        queries, keys = rotate(qk, new.cos, new.sin).split((heads, kv_heads), 1)
        new.kv.write(layer, new.slots, keys, values)
        return queries

    def write_latents(self, latents: Tensor, layer: int, new: NewTokens) -> None:
        new.kv.write_latents(layer, new.slots, latents)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)  # [tokens, intermediate] each
        return functional.silu(gate).mul_(up)


TORCH_OPS = TorchOps()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [tokens, heads, rotary_dim]. Dimension i pairs with i + rotary_dim / 2."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)
