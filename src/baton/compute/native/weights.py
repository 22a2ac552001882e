"""Load a model's weights into the native library: the attention of a layer or one MLP at a time."""

from __future__ import annotations

import numpy as np

from baton.compute.models.model_config import Experts, Latent, ModelConfig
from baton.compute.models.quantized import QuantizedMatrix
from baton.compute.models.rope import rotary_order
from baton.compute.models.tensor_names import ExpertNames, expert_names
from baton.compute.native.library import NativeLatent, NativeLayer, NativeMatrix, NativeMlp, NativeRouter, NativeWeights
from baton.compute.native.matrices import HeldArrays, MatrixReader


class NativeWeightLoader:
    """Reads tensors and passes them to the library, which copies them."""

    def __init__(self, target: NativeWeights, config: ModelConfig, reader: MatrixReader) -> None:
        self._target = target
        self._config = config
        self._reader = reader
        self._held = HeldArrays()
        self._latent = None if config.latent is None else LatentMatrices(config, config.latent, reader, self._held)

    def set_all(self) -> None:
        for index in range(self._config.layers):
            self._add_attention(index, f"model.layers.{index}.self_attn.")
            self._held.release()
            self._add_mlps(index)
        embedding = self._matrix(["model.embed_tokens"], biased=False)
        tied = self._config.tied_embeddings
        head = embedding if tied else self._matrix(["lm_head"], biased=False)
        self._target.finish_weights(self._vector("model.norm.weight"), head, None if tied else embedding)
        self._held.release()

    def _add_attention(self, index: int, attention: str) -> None:
        if self._latent is None:
            qkv = self._matrix([f"{attention}{part}_proj" for part in "qkv"], biased=self._config.qkv_bias)
            self._target.set_layer(index, self._layer(index, attention, qkv))
        else:
            self._target.set_layer(index, self._layer(index, attention, self._latent.qkv(attention)))
            self._target.set_latent(index, self._latent.norms_and_up_projections(attention))

    def _layer(self, index: int, attention: str, qkv: NativeMatrix) -> NativeLayer:
        config, prefix = self._config, f"model.layers.{index}."
        return NativeLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight"),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight"),
            q_norm=self._vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            qkv=qkv,
            o=self._matrix([f"{attention}o_proj"], biased=config.o_bias),
            window=config.windows[index] or 0,
        )

    def _add_mlps(self, index: int) -> None:
        experts, prefix = self._config.experts, f"model.layers.{index}."
        if experts is not None and index in experts.layers:
            self._add_experts(index, experts, expert_names(self._config.architecture))
        else:
            parts = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down")]
            self._add_mlp(index, *parts, biased=self._config.mlp_bias)

    def _add_experts(self, index: int, experts: Experts, names: ExpertNames) -> None:
        prefix = f"model.layers.{index}."
        self._target.set_router(index, self._router(prefix, experts, names))
        for expert in range(experts.count):
            self._add_mlp(index, *(prefix + part for part in names.expert(expert)))
        if experts.shared_intermediate:
            shared = f"{prefix}{names.shared}."
            self._add_mlp(index, f"{shared}gate_proj", f"{shared}up_proj", f"{shared}down_proj")

    def _router(self, prefix: str, experts: Experts, names: ExpertNames) -> NativeRouter:
        scores = [names.router, *([names.shared_gate] if experts.shared_gate else [])]
        rows = np.concatenate([self._reader.float32(f"{prefix}{name}.weight") for name in scores])
        return NativeRouter(
            scores=self._held.matrix(rows),
            experts=experts.count,
            used=experts.per_token,
            normalized=experts.normalized,
            sigmoid=experts.scoring == "sigmoid",
            groups=experts.groups,
            groups_used=experts.groups_used,
            group_best=2 if experts.group_score == "best_two" else 1,
            scale=experts.scale,
            choice_bias=self._vector(prefix + names.choice_bias) if experts.biased_choice else None,
        )

    def _add_mlp(self, index: int, gate: str, up: str, down: str, *, biased: bool = False) -> None:
        mlp = NativeMlp(self._matrix([gate, up], biased=biased), self._matrix([down], biased=biased))
        self._target.add_mlp(index, mlp)
        self._held.release()

    def _matrix(self, names: list[str], *, biased: bool) -> NativeMatrix:
        bias = np.concatenate([self._reader.float32(f"{name}.bias") for name in names]) if biased else None
        return self._held.matrix(self._reader.matrix(names), bias)

    def _vector(self, name: str) -> int:
        return self._held.address(self._reader.float32(name))


class LatentMatrices:
    """Reads the attention weights of a layer. `prefix` is always `model.layers.N.self_attn.`."""

    def __init__(self, config: ModelConfig, latent: Latent, reader: MatrixReader, held: HeldArrays) -> None:
        self._config = config
        self._latent = latent
        self._reader = reader
        self._held = held
        head_rows = latent.nope_dim + latent.rope_dim
        firsts = np.arange(config.heads)[:, None] * head_rows
        self._query_order = (firsts + rotary_order(head_rows, latent)).ravel()  # [heads * (nope_dim + rope_dim)]
        self._key_order = rotary_order(config.head_dim, latent)  # [kv_rank + rope_dim]

    def qkv(self, prefix: str) -> NativeMatrix:
        """Read the projections of the hidden state as one matrix: first queries, then the latent of keys and values.

        With a query rank (`q_a_proj`), the first rows give the compressed queries, else (`q_proj`) those of all heads.
        """
        narrow = self._latent.q_rank
        first = f"{prefix}{'q_proj' if narrow is None else 'q_a_proj'}"
        order = self._query_order if narrow is None else np.arange(narrow)
        order = np.concatenate((order, len(order) + self._key_order))
        found = self._reader.matrix([first, f"{prefix}kv_a_proj_with_mqa"])
        return self._held.matrix(_in_order(found, order), self._bias(prefix, order))

    def _bias(self, prefix: str, order: np.ndarray) -> np.ndarray | None:
        """Return the bias of `qkv`. It is zero for rows of queries that have no bottleneck."""
        if not self._config.qkv_bias:
            return None
        latent = self._reader.float32(f"{prefix}kv_a_proj_with_mqa.bias")
        if self._latent.q_rank is not None:
            first = self._reader.float32(f"{prefix}q_a_proj.bias")
        else:
            first = np.zeros(len(order) - len(latent), dtype=np.float32)
        return np.concatenate((first, latent))[order]

    def norms_and_up_projections(self, prefix: str) -> NativeLatent:
        """Read what `qkv` leaves out. Up projections are dense, because a transposed matrix cannot keep its codes."""
        latent, held, narrow = self._latent, self._held, self._latent.q_rank is not None
        up = self._reader.dense(f"{prefix}kv_b_proj.weight")
        up = up.reshape(self._config.heads, -1, latent.kv_rank)  # [heads, nope_dim + value_dim, kv_rank]
        keys, values = up[:, : latent.nope_dim].swapaxes(1, 2), up[:, latent.nope_dim :]
        found = NativeLatent(
            q_norm=held.address(self._reader.float32(f"{prefix}q_a_layernorm.weight")) if narrow else None,
            kv_norm=held.address(self._reader.float32(f"{prefix}kv_a_layernorm.weight")),
            keys=held.matrix(keys.reshape(-1, latent.nope_dim)),
            values=held.matrix(values.reshape(-1, latent.kv_rank)),
        )
        if narrow:
            queries = self._reader.matrix([f"{prefix}q_b_proj"])
            found.queries = held.matrix(_in_order(queries, self._query_order))
        return found


def _in_order(found: np.ndarray | QuantizedMatrix, order: np.ndarray) -> np.ndarray | QuantizedMatrix:
    return found.rows_in_order(order) if isinstance(found, QuantizedMatrix) else found[order]
