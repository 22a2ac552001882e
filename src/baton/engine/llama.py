"""The forward pass of every model of the Llama family: one file, driven by ModelConfig.

All slices' tokens stand in one ragged batch [tokens, hidden]; no layer sees padding. Keys and values go straight to
the arena's blocks, and attention reads them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.backend import AttentionBackend, AttentionPlan
from baton.engine.kernels.linear import Linear, make_linear
from baton.engine.kernels.paged import PagedKV, Row
from baton.engine.model_config import ModelConfig
from baton.engine.rope import Rotary, rotate
from baton.engine.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights. Projections that read the same input are one matrix."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # to [heads + 2 * kv_heads] * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # to 2 * intermediate
    down: Linear


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one step share."""

    kv: PagedKV
    plan: AttentionPlan
    slots: Tensor  # [layers * 2, tokens]
    cos: Tensor  # [tokens, 1, head_dim]
    sin: Tensor


class Llama:
    """Weights and one method: hidden states of a ragged batch."""

    def __init__(self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        loader = _Loader(reader, dtype, device)
        self._embedding = loader.tensor("model.embed_tokens.weight")  # [vocab, hidden]
        self._layers = [loader.layer(config, index) for index in range(config.layers)]
        self._norm = loader.tensor("model.norm.weight")
        # A packed head is a second copy of a tied table: a lookup needs rows, a fast product needs blocks.
        head = self._embedding if config.tied_embeddings else loader.tensor("lm_head.weight")
        self._head = make_linear(head)
        self._rotary = Rotary(config, dtype=dtype, device=device)

    def forward(self, tokens: Tensor, rows: Sequence[Row], kv: PagedKV, backend: AttentionBackend) -> Tensor:
        """Compute every token of the batch and write its KV. tokens: [tokens]. Returns [tokens, hidden]."""
        positions = torch.cat([torch.arange(row.start, row.total, device=tokens.device) for row in rows])
        cos, sin = self._rotary.at(positions)
        shared = _Pass(kv=kv, plan=backend.plan(rows, kv), slots=kv.slots(rows), cos=cos, sin=sin)
        hidden = self._embedding[tokens]  # [tokens, hidden]
        for index, layer in enumerate(self._layers):
            hidden = hidden + layer.o(self._attend(index, layer, hidden, shared))
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Project some rows of hidden states to the vocabulary: [rows, vocab], float32."""
        return self._head(self._normalized(hidden, self._norm)).float()

    def _attend(self, index: int, layer: Layer, hidden: Tensor, shared: _Pass) -> Tensor:
        """Write this layer's keys and values, then attend. Returns [tokens, heads * head_dim]."""
        config = self.config
        qkv = layer.qkv(self._normalized(hidden, layer.input_norm))
        qkv = qkv.view(len(hidden), -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        qk, values = qkv.split((config.heads + config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = qk.split((config.heads, config.kv_heads), 1)
            qk = torch.cat((self._normalized(queries, layer.q_norm), self._normalized(keys, layer.k_norm)), 1)
        queries, keys = rotate(qk, shared.cos, shared.sin).split((config.heads, config.kv_heads), 1)
        shared.kv.write(index, shared.slots, keys, values)
        return shared.plan.run(index, queries, config.windows[index])

    def _mlp(self, layer: Layer, hidden: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._normalized(hidden, layer.mlp_norm)).chunk(2, -1)  # [tokens, intermediate] each
        return layer.down(functional.silu(gate).mul_(up))

    def _normalized(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self.config.rms_eps)


class _Loader:
    """Reads tensors one layer at a time, so that no more than one layer is held twice."""

    def __init__(self, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self._reader = reader
        self._dtype = dtype
        self._device = device

    def tensor(self, name: str) -> Tensor:
        return self._reader.read(name).to(device=self._device, dtype=self._dtype).contiguous()

    def layer(self, config: ModelConfig, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv_names = [f"{attention}{part}_proj" for part in ("q", "k", "v")]
        gate_up_names = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        return Layer(
            input_norm=self.tensor(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(qkv_names, biased=config.qkv_bias),
            q_norm=self.tensor(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self.tensor(f"{attention}k_norm.weight") if config.qk_norm else None,
            o=self._linear([f"{attention}o_proj"], biased=config.o_bias),
            mlp_norm=self.tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(gate_up_names, biased=config.mlp_bias),
            down=self._linear([f"{mlp}down_proj"], biased=config.mlp_bias),
        )

    def _linear(self, names: list[str], *, biased: bool) -> Linear:
        weight = _stacked([self.tensor(f"{name}.weight") for name in names])
        bias = _stacked([self.tensor(f"{name}.bias") for name in names]) if biased else None
        return make_linear(weight, bias)


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
