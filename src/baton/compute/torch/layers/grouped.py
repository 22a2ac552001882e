"""Grouped-query attention: the cache holds a key and a value per KV head and token. Source: arXiv 2305.13245."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.compute.models.model_config import ModelConfig
from baton.compute.torch.kernels.attention_backend import AttentionBackend, AttentionPlan
from baton.compute.torch.kernels.layer_ops import HeadNorms, NewTokens
from baton.compute.torch.kernels.linear import Linear
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.layers.attention import PlannedStep, positions_of
from baton.compute.torch.layers.rope import Rotary
from baton.compute.torch.layers.tensor_loader import TensorLoader


@dataclass(frozen=True, slots=True)
class _GroupedLayer:
    """The weights of one layer. Projections of the same input are one matrix."""

    qkv: Linear  # to [heads + 2 * kv_heads] * head_dim
    norms: HeadNorms | None
    o: Linear


class GroupedAttention:
    """Implements `Attention` with grouped queries: several query heads share one KV head."""

    def __init__(self, config: ModelConfig, loader: TensorLoader) -> None:
        self.config = config
        self.ops = loader.ops
        self.layers = [_load(config, loader, f"model.layers.{layer}.self_attn.") for layer in range(config.layers)]
        self._rotary = Rotary(config, dtype=loader.dtype, device=loader.device)

    def begin(self, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> GroupedPass:
        return self.begin_decode(
            PlannedStep(positions_of(rows, kv.data.device), kv.slots(rows), kv, backend.plan(rows, kv))
        )

    def begin_decode(self, step: PlannedStep) -> GroupedPass:
        cos, sin = self._rotary.at(step.positions)
        return GroupedPass(self, step.plan, NewTokens(cos, sin, step.slots, step.kv))


@dataclass(frozen=True, slots=True)
class GroupedPass:
    """Implements `AttentionPass` for one step of `GroupedAttention`."""

    attention: GroupedAttention
    plan: AttentionPlan
    new: NewTokens

    def attend(self, layer: int, hidden: Tensor) -> Tensor:
        config, weights = self.attention.config, self.attention.layers[layer]
        qkv = weights.qkv(hidden).view(len(hidden), -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        queries = self.attention.ops.rotate_and_write(qkv, layer, self.new, weights.norms)
        return weights.o(self.plan.run(layer, queries, config.windows[layer]))


def _load(config: ModelConfig, loader: TensorLoader, prefix: str) -> _GroupedLayer:
    norms = None
    if config.qk_norm:
        queries, keys = loader.tensor(f"{prefix}q_norm.weight"), loader.tensor(f"{prefix}k_norm.weight")
        norms = HeadNorms(queries, keys, config.rms_eps)
    return _GroupedLayer(
        qkv=loader.linear(*(f"{prefix}{part}_proj" for part in "qkv"), biased=config.qkv_bias),
        norms=norms,
        o=loader.linear(f"{prefix}o_proj", biased=config.o_bias),
    )
