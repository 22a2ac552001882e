"""Grouped-query attention: the cache holds a key and a value per KV head and token. Source: arXiv 2305.13245."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.linear import Linear
from baton.compute.torch.kernels.norm import rms_norm
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep, positions_of
from baton.compute.torch.layers.rope import Rotary, rotate
from baton.compute.torch.layers.tensor_loader import TensorLoader


@dataclass(frozen=True, slots=True)
class _GroupedLayer:
    """The weights of one layer. Projections of the same input are one matrix."""

    qkv: Linear  # to [heads + 2 * kv_heads] * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Linear


class GroupedAttention:
    """Implements `Attention` with grouped queries: several query heads share one KV head."""

    def __init__(self, config: ModelConfig, loader: TensorLoader) -> None:
        self.config = config
        self.layers = [_load(config, loader, f"model.layers.{layer}.self_attn.") for layer in range(config.layers)]
        self._rotary = Rotary(config, dtype=loader.dtype, device=loader.device)

    def begin(self, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> GroupedPass:
        return self.begin_decode(
            PlannedStep(positions_of(rows, kv.data.device), kv.slots(rows), kv, backend.plan(rows, kv))
        )

    def begin_decode(self, step: PlannedStep) -> GroupedPass:
        cos, sin = self._rotary.at(step.positions)
        return GroupedPass(self, step, cos, sin)


@dataclass(frozen=True, slots=True)
class GroupedPass:
    """Implements `AttentionPass` for one step of `GroupedAttention`."""

    attention: GroupedAttention
    step: PlannedStep
    cos: Tensor  # [tokens, 1, head_dim]
    sin: Tensor

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        config, weights = self.attention.config, self.attention.layers[layer]
        qkv = weights.qkv(hidden).view(len(hidden), -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        qk, values = qkv.split((config.heads + config.kv_heads, config.kv_heads), 1)
        if weights.q_norm is not None and weights.k_norm is not None:
            queries, keys = qk.split((config.heads, config.kv_heads), 1)
            normal_queries = rms_norm(queries, weights.q_norm, config.rms_eps)
            qk = torch.cat((normal_queries, rms_norm(keys, weights.k_norm, config.rms_eps)), 1)
        queries, keys = rotate(qk, self.cos, self.sin).split((config.heads, config.kv_heads), 1)
        self.step.kv.write(layer, self.step.slots, keys, values)
        return weights.o(self.step.plan.run(layer, queries, config.windows[layer]))


def _load(config: ModelConfig, loader: TensorLoader, prefix: str) -> _GroupedLayer:
    return _GroupedLayer(
        qkv=loader.linear(*(f"{prefix}{part}_proj" for part in "qkv"), biased=config.qkv_bias),
        q_norm=loader.tensor(f"{prefix}q_norm.weight") if config.qk_norm else None,
        k_norm=loader.tensor(f"{prefix}k_norm.weight") if config.qk_norm else None,
        o=loader.linear(f"{prefix}o_proj", biased=config.o_bias),
    )
