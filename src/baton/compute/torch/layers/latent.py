"""Multi-head latent attention: the cache holds one vector per token. Source: DeepSeek-V2 (arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.models.model_config import Latent, ModelConfig
from baton.compute.models.rope import rotary_order
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.latent import LatentPlan, UpProjection, plan_latent
from baton.compute.torch.kernels.layer_ops import NewTokens, rotate
from baton.compute.torch.kernels.linear import Linear
from baton.compute.torch.kernels.norm import rms_norm
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep, positions_of
from baton.compute.torch.layers.collectives import Collectives
from baton.compute.torch.layers.rope import Rotary
from baton.compute.torch.layers.tensor_loader import TensorLoader

LATENT_NORM_EPS = 1e-6
"""The epsilon of norms inside attention, for all models. Source: DeepSeek's published model code."""


@dataclass(frozen=True, slots=True)
class _LatentLayer:
    q_a: Linear | None  # to q_rank. None: queries come from the hidden state
    q_a_norm: Tensor | None  # [q_rank]
    q_b: Linear  # to heads * (nope_dim + rope_dim)
    kv_a: Linear  # to kv_rank + rope_dim
    kv_a_norm: Tensor  # [kv_rank]
    up: UpProjection
    o: Linear


class LatentAttention:
    """Implements `Attention` with one cached latent vector per token."""

    def __init__(self, config: ModelConfig, latent: Latent, loader: TensorLoader, collectives: Collectives) -> None:
        self.heads = config.heads
        self.ops = loader.ops
        self.latent = latent
        self._collectives = collectives
        self.layers = [
            _load(config, latent, loader, f"model.layers.{layer}.self_attn.") for layer in range(config.layers)
        ]
        self._rotary = Rotary(config, dtype=loader.dtype, device=loader.device)

    def begin(self, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> LatentPass:
        plan = plan_latent(rows, kv, backend, self.latent, self._collectives)
        return self._begin(positions_of(rows, kv.data.device), kv.slots(rows), plan)

    def begin_decode(self, step: PlannedStep) -> LatentPass:
        tokens = torch.arange(len(step.positions), device=step.positions.device)
        return self._begin(step.positions, step.slots, LatentPlan(self.latent, step.kv, step.plan, tokens, ()))

    def _begin(self, positions: Tensor, slots: Tensor, plan: LatentPlan) -> LatentPass:
        cos, sin = self._rotary.at(positions)
        return LatentPass(self, plan, NewTokens(cos, sin, slots, plan.kv))


@dataclass(frozen=True, slots=True)
class LatentPass:
    """Implements `AttentionPass` for one step of `LatentAttention`."""

    attention: LatentAttention
    plan: LatentPlan
    new: NewTokens

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        latent, weights = self.attention.latent, self.attention.layers[layer]
        narrow = hidden
        if weights.q_a is not None and weights.q_a_norm is not None:
            narrow = rms_norm(weights.q_a(hidden), weights.q_a_norm, LATENT_NORM_EPS)  # [tokens, q_rank]
        queries = weights.q_b(narrow).view(len(hidden), self.attention.heads, -1)
        nope, query_rope = queries.split((latent.nope_dim, latent.rope_dim), -1)
        compressed, key_rope = weights.kv_a(hidden).split((latent.kv_rank, latent.rope_dim), -1)
        compressed = rms_norm(compressed, weights.kv_a_norm, LATENT_NORM_EPS)  # [tokens, kv_rank]
        turned = rotate(torch.cat((query_rope, key_rope[:, None]), 1), self.new.cos, self.new.sin)
        self.attention.ops.write_latents(torch.cat((compressed, turned[:, -1]), -1), layer, self.new)
        return weights.o(self.plan.run(layer, nope, turned[:, :-1], weights.up))


def _load(config: ModelConfig, latent: Latent, loader: TensorLoader, prefix: str) -> _LatentLayer:
    head_dim = latent.nope_dim + latent.rope_dim
    bottleneck = latent.q_rank is not None
    q_b = loader.tensor(f"{prefix}{'q_b_proj' if bottleneck else 'q_proj'}.weight").unflatten(0, (config.heads, -1))
    q_b = _in_rotary_order(q_b.transpose(0, 1), latent).transpose(0, 1)  # [heads, head_dim, q_rank or hidden]
    kv_a = f"{prefix}kv_a_proj_with_mqa"
    kv_a_bias = _in_rotary_order(loader.tensor(f"{kv_a}.bias"), latent) if config.qkv_bias else None
    kv_b = loader.tensor(f"{prefix}kv_b_proj.weight").unflatten(0, (config.heads, latent.nope_dim + latent.value_dim))
    keys, values = kv_b.split((latent.nope_dim, latent.value_dim), 1)  # [heads, nope_dim or value_dim, kv_rank]
    return _LatentLayer(
        q_a=loader.linear(f"{prefix}q_a_proj", biased=config.qkv_bias) if bottleneck else None,
        q_a_norm=loader.tensor(f"{prefix}q_a_layernorm.weight") if bottleneck else None,
        q_b=loader.product(q_b.reshape(config.heads * head_dim, -1)),
        kv_a=loader.product(_in_rotary_order(loader.tensor(f"{kv_a}.weight"), latent), kv_a_bias),
        kv_a_norm=loader.tensor(f"{prefix}kv_a_layernorm.weight"),
        up=UpProjection(keys.contiguous(), values.transpose(1, 2).contiguous()),
        o=loader.linear(f"{prefix}o_proj", biased=config.o_bias),
    )


def _in_rotary_order(rows: Tensor, latent: Latent) -> Tensor:
    """Reorder the last rope_dim rows of a projection so that dimension i pairs with i + rope_dim / 2."""
    return rows[torch.from_numpy(rotary_order(len(rows), latent))]
