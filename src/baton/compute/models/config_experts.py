"""Read the mixture of experts and the latent attention of a config.json. Each family of models has its own keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from baton.compute.models.model_config import EXPERTS_IN_ALL_MAX, EXPERTS_MAX, Experts, Latent
from baton.core.errors import ModelError

QWEN = ("qwen2moe", "qwen3moe")
DEEPSEEK = ("deepseek2", "deepseek3")


class _Experts(Struct, kw_only=True):
    intermediate_size: int
    num_experts_per_tok: int = 0
    num_local_experts: int = 0
    num_experts: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int | None = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str | None = None
    scoring_func: str | None = None

    @property
    def count(self) -> int:
        return self.num_local_experts or self.num_experts or self.n_routed_experts


class _Latent(Struct, kw_only=True):
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True


def read_experts(where: Path, raw: Mapping[str, Any], architecture: str, layers: int) -> Experts | None:
    """Return the mixture of experts, or None for a dense model. Raises ModelError for invalid sizes."""
    if architecture not in ("mixtral", *QWEN, *DEEPSEEK):
        return None
    config = msgspec.convert(raw, _Experts)
    if architecture == "mixtral":
        experts = Experts(
            layers=tuple(range(layers)),
            count=config.count,
            per_token=config.num_experts_per_tok,
            intermediate=config.intermediate_size,
            normalized=True,
        )
    elif architecture in QWEN:
        experts = _qwen(config, architecture, layers)
    else:
        experts = _deepseek(where, config, architecture, layers)
    return check_experts(where, experts)


def check_experts(where: Path, experts: Experts) -> Experts | None:
    """Return `experts`, or None if no layer has any. Raises ModelError for sizes that contradict each other."""
    if not experts.layers or experts.count == 0:
        return None
    in_group, rest = divmod(experts.count, max(experts.groups, 1))
    selectable = in_group * experts.groups_used
    if (
        not 0 < experts.count <= EXPERTS_MAX
        or experts.count * len(experts.layers) > EXPERTS_IN_ALL_MAX
        or not 0 < experts.groups_used <= experts.groups
        or rest
        or not 0 < experts.per_token <= selectable
        or experts.intermediate <= 0
        or (experts.group_score == "best_two" and in_group < 2)
    ):
        raise ModelError(
            f"{where}: {experts.per_token} of {experts.count} experts from {experts.groups_used} of {experts.groups} "
            f"groups of width {experts.intermediate} do not fit together; use the model's own file"
        )
    return experts


def _qwen(config: _Experts, architecture: str, layers: int) -> Experts:
    dense = config.mlp_only_layers or []
    routed = [layer for layer in range(layers) if layer not in dense and (layer + 1) % config.decoder_sparse_step == 0]
    return Experts(
        layers=tuple(routed),
        count=config.count,
        per_token=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        normalized=config.norm_topk_prob,
        shared_intermediate=config.shared_expert_intermediate_size if architecture == "qwen2moe" else 0,
        shared_gate=architecture == "qwen2moe",
    )


def _deepseek(where: Path, config: _Experts, architecture: str, layers: int) -> Experts:
    third = architecture == "deepseek3"
    method = config.topk_method or ("noaux_tc" if third else "greedy")
    scoring = config.scoring_func or ("sigmoid" if third else "softmax")
    known = [("noaux_tc", "sigmoid")] if third else [("greedy", "softmax"), ("group_limited_greedy", "softmax")]
    if (method, scoring) not in known or config.moe_layer_freq != 1 or (config.norm_topk_prob and not third):
        raise ModelError(
            f"{where}: experts chosen by {method} from {scoring} scores, every {config.moe_layer_freq} layers, "
            f"normalized: {config.norm_topk_prob}; Baton computes {known} in every layer, "
            "normalized for DeepSeek-V3 only"
        )
    return Experts(
        layers=tuple(range(max(config.first_k_dense_replace, 0), layers)),
        count=config.count,
        per_token=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        scoring="sigmoid" if third else "softmax",
        normalized=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=1 if method == "greedy" else config.n_group or 1,
        groups_used=1 if method == "greedy" else config.topk_group or 1,
        group_score="best_two" if third else "best",
        biased_choice=third,
        shared_intermediate=(config.n_shared_experts or 0) * config.moe_intermediate_size,
    )


def read_latent(where: Path, raw: Mapping[str, Any], architecture: str, score_temperature: float) -> Latent | None:
    """Return the sizes of latent attention, or None for a model without it. Raises ModelError for invalid sizes.

    score_temperature: the factor of yarn on the usual scale of attention scores (1 without yarn).
    """
    if architecture not in DEEPSEEK:
        return None
    config = msgspec.convert(raw, _Latent)
    latent = Latent(
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        nope_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        score_scale=score_temperature * (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        rope_pairs=config.rope_interleave or architecture == "deepseek2",
    )
    return check_latent(where, latent)


def check_latent(where: Path, latent: Latent) -> Latent:
    """Return `latent`. Raises ModelError for sizes that are not positive, or an odd rope_dim."""
    sizes = (latent.kv_rank, latent.rope_dim, latent.nope_dim, latent.value_dim)
    if min(sizes) <= 0 or latent.rope_dim % 2 or (latent.q_rank is not None and latent.q_rank <= 0):
        raise ModelError(
            f"{where}: latent attention of rank {latent.kv_rank} with heads of {latent.nope_dim} + {latent.rope_dim} "
            f"dimensions and values of {latent.value_dim} is impossible; use the model's own file"
        )
    return latent
