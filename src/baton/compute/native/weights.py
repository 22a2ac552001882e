"""Load a model's weights into the native library: the attention of a layer or one MLP at a time."""

from __future__ import annotations

import numpy as np

from baton.compute.models.model_config import Experts, ModelConfig
from baton.compute.models.tensor_names import ExpertNames, expert_names
from baton.compute.native.latent_weights import LatentMatrices
from baton.compute.native.library import NativeLayer, NativeMatrix, NativeMlp, NativeRouter, NativeWeights
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
