"""Numbers in a GGUF file's metadata, and what they say of a mixture of experts and of latent attention."""

from __future__ import annotations

from gguf import ExpertGatingFuncType

from baton.compute.models.config_experts import check_experts, check_latent
from baton.compute.models.config_json import yarn_score_temperature
from baton.compute.models.gguf_file import GGUFFile
from baton.compute.models.model_config import Experts, Latent
from baton.core.errors import ModelError

YARN_LOG = "rope.scaling.yarn_log_multiplier"
"""A tenth of what config.json calls mscale_all_dim. Source: convert_hf_to_gguf.py of llama.cpp."""


class GGUFKeys:
    """Metadata under the architecture's own prefix, checked for being numbers."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise ModelError(
                f"{self.file.path}: {self.architecture}.{key} is {value!r}, not a number; convert the model again"
            )
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.file.metadata.get(f"{self.architecture}.{key}", default))


def experts_of(keys: GGUFKeys, layers: int) -> Experts | None:
    """Return the mixture of experts that a file holds, None for a dense model."""
    count = keys.integer("expert_count", 0)
    if not count:
        return None
    deepseek = keys.architecture == "deepseek2"
    width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    shared = keys.integer("expert_shared_feed_forward_length", keys.integer("expert_shared_count", 0) * width)
    sigmoid = keys.integer("expert_gating_func", ExpertGatingFuncType.SOFTMAX) == ExpertGatingFuncType.SIGMOID
    routed = range(keys.integer("leading_dense_block_count", 0), layers)
    groups = keys.integer("expert_group_count", 1) or 1
    experts = Experts(
        layers=tuple(routed),
        count=count,
        used=keys.integer("expert_used_count"),
        intermediate=width,
        scoring="sigmoid" if sigmoid else "softmax",
        # llama.cpp knows of each architecture but DeepSeek's whether it normalizes, and writes it into no file.
        normalized=bool(keys.integer("expert_weights_norm", 0)) if deepseek else keys.architecture != "qwen2moe",
        scale=keys.number("expert_weights_scale", 1.0) if deepseek else 1.0,
        groups=groups,
        groups_used=keys.integer("expert_group_used_count", groups) or groups,
        group_score="best_two" if sigmoid else "best",
        biased_choice=f"blk.{routed.start}.exp_probs_b.bias" in keys.file.tensors,
        shared_intermediate=shared if deepseek or keys.architecture == "qwen2moe" else 0,
        shared_gate=keys.architecture == "qwen2moe",
    )
    return check_experts(keys.file.path, experts)


def latent_of(keys: GGUFKeys) -> Latent | None:
    """Return the sizes of latent attention.

    Files before the middle of 2025 tell a head's sizes as key_length and value_length; newer ones keep those for the
    absorbed form and add `_mla`.
    """
    if keys.architecture != "deepseek2":
        return None
    head_dim = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    rope_dim = keys.integer("rope.dimension_count")
    factor = keys.number("rope.scaling.factor", 1.0)
    latent = Latent(
        q_rank=keys.integer("attention.q_lora_rank", 0) or None,
        kv_rank=keys.integer("attention.kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=head_dim - rope_dim,
        value_dim=keys.integer("attention.value_length_mla", keys.integer("attention.value_length")),
        score_scale=yarn_score_temperature(factor, 10 * keys.number(YARN_LOG, 0.0)) * max(head_dim, 1) ** -0.5,
        rope_pairs=True,
    )
    return check_latent(keys.file.path, latent)
