"""Read a model's configuration from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

from baton.compute.models.config_experts import check_experts, check_latent
from baton.compute.models.config_json import yarn_attention_factor, yarn_score_temperature
from baton.compute.models.gguf_file import GGUFFile
from baton.compute.models.gguf_names import GGUFName, gguf_name, split_kv_b
from baton.compute.models.model_config import (
    LAYERS_MAX,
    SIZE_MAX,
    Experts,
    Latent,
    ModelConfig,
    RopeScaling,
    check_config,
)
from baton.compute.models.tensor_names import expected_shapes
from baton.core.errors import ModelError

YARN_LOG = "rope.scaling.yarn_log_multiplier"
"""Key of a tenth of config.json's mscale_all_dim. Source: convert_hf_to_gguf.py of llama.cpp."""


class GGUFKeys:
    """Reads the metadata under the prefix of the architecture. Raises ModelError where a value is not a number."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(
                f"{self.file.path}: {self.architecture}.{key} is {str(value)[:80]!r}, not a number;"
                " convert the model again"
            )
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.file.metadata.get(f"{self.architecture}.{key}", default))


def _experts(keys: GGUFKeys, layers: int) -> Experts | None:
    """Return the mixture of experts of a file, or None for a dense model. Raises ModelError for invalid sizes."""
    count = keys.integer("expert_count", 0)
    if not count:
        return None
    from gguf import ExpertGatingFuncType

    deepseek = keys.architecture == "deepseek2"
    width = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    shared = keys.integer("expert_shared_feed_forward_length", keys.integer("expert_shared_count", 0) * width)
    sigmoid = keys.integer("expert_gating_func", ExpertGatingFuncType.SOFTMAX) == ExpertGatingFuncType.SIGMOID
    routed = range(max(keys.integer("leading_dense_block_count", 0), 0), layers)
    groups = keys.integer("expert_group_count", 1) or 1
    experts = Experts(
        layers=tuple(routed),
        count=count,
        per_token=keys.integer("expert_used_count"),
        intermediate=width,
        scoring="sigmoid" if sigmoid else "softmax",
        # Only DeepSeek files have these keys. For other architectures, the values are constants in llama.cpp's code.
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


def _latent(keys: GGUFKeys) -> Latent | None:
    """Return the sizes of latent attention, or None for a model without it. Raises ModelError for invalid sizes.

    Files before the middle of 2025 give the sizes of a head as key_length and value_length. Newer files use these keys
    for the absorbed form, and add keys with the suffix `_mla` for a head.
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


GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "deepseek2")
ROPE_FREQS, ROPE_FREQS_MAX = "rope_freqs.weight", 1 << 16


def read_config_gguf(file: GGUFFile) -> ModelConfig:
    """Return the model's configuration. Raises ModelError for an architecture or option that Baton does not support."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {str(architecture)[:80]}; Baton serves {', '.join(GGUF_ARCHITECTURES)}"
        )
    keys = GGUFKeys(file, str(architecture))
    layers, heads, hidden = (
        keys.integer("block_count"),
        keys.integer("attention.head_count"),
        keys.integer("embedding_length"),
    )
    head_dim = keys.integer("attention.key_length", hidden // heads if heads else 0)
    if min(layers, heads, hidden, head_dim) <= 0 or layers > LAYERS_MAX:
        raise ModelError(
            f"{file.path} claims {layers} layers and {heads} heads of {head_dim}; it is damaged: download it again"
        )
    latent = _latent(keys)
    rotated, rotary_dim = keys.integer("rope.dimension_count", head_dim), latent.rope_dim if latent else head_dim
    if rotated != rotary_dim:
        raise ModelError(f"{file.path} rotates {rotated} of {rotary_dim} dimensions; Baton rotates whole heads")
    window = keys.integer("attention.sliding_window", 0) if architecture in ("llama", "mistral") else 0
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is no whole model (a shard or an adapter?)")
    experts = _experts(keys, layers)
    config = ModelConfig(
        architecture=_family(str(architecture), experts),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=1 if latent else keys.integer("attention.head_count_kv", heads),
        head_dim=latent.kv_rank + latent.rope_dim if latent else head_dim,
        intermediate=keys.integer("feed_forward_length"),
        vocab_tokens=embedding.shape[0],
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=keys.number("rope.freq_base", 10_000.0),
        rope=_rope(keys),
        context_tokens=keys.integer("context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors or "blk.0.attn_kv_a_mqa.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture in ("qwen3", "qwen3moe"),
        windows=(window or None,) * layers,
        eos_token_ids=tuple(dict.fromkeys(_stop_tokens(file))),
        bos_token_id=_token_id(file, "bos"),
        experts=experts,
        latent=latent,
    )
    return check_config(file.path, config)


def _family(architecture: str, experts: Experts | None) -> str:
    """Return Baton's name of an architecture. GGUF has one name for Llama and Mixtral, one for both DeepSeeks."""
    if architecture == "llama" and experts is not None:
        return "mixtral"
    if architecture == "deepseek2" and experts is not None and experts.scoring == "sigmoid":
        return "deepseek3"
    return architecture


def gguf_shapes(file: GGUFFile, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return (expected, found) tensor shapes, both by Hugging Face name."""
    expected = expected_shapes(config)
    found = {name: _shape(file, gguf_name(name)) for name in expected}
    return expected, {name: shape for name, shape in found.items() if shape is not None}


def _shape(file: GGUFFile, name: GGUFName) -> tuple[int, ...] | None:
    """Return the shape that `GGUFWeights.read` returns for a tensor, or None if the file lacks the tensor."""
    tensor = file.tensors.get(name.tensor)
    if tensor is None:
        keys, values = (file.tensors.get(part) for part in split_kv_b(name))
        if keys is None or values is None or len(keys.shape) != 3 or len(values.shape) != 3:
            return None
        return (keys.shape[0] * (keys.shape[2] + values.shape[1]), keys.shape[1])
    if name.expert is not None:
        return tensor.shape[1:] if name.expert < tensor.shape[0] else None
    return (1, *tensor.shape) if name.tensor.endswith("ffn_gate_inp_shexp.weight") else tensor.shape


def _rope(keys: GGUFKeys) -> RopeScaling:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    divisors = _frequency_divisors(keys.file)
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_context_tokens=keys.integer(
                "rope.scaling.original_context_length", keys.integer("context_length")
            ),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=keys.number("rope.scaling.attn_factor", 1.0) * _attention_factor(keys, factor),
            frequency_divisors=divisors,
        )
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{keys.file.path}: rope scaling {kind[:80]}; Baton computes none, linear, yarn and rope_freqs"
        )
    return RopeScaling(kind="linear" if factor != 1.0 else "default", factor=factor, frequency_divisors=divisors)


def _attention_factor(keys: GGUFKeys, factor: float) -> float:
    """Return yarn's factor on cosine and sine. 1 for DeepSeek, which scales attention scores instead: see `_latent`."""
    return 1.0 if keys.number(YARN_LOG, 0.0) else yarn_attention_factor(factor)


def _frequency_divisors(file: GGUFFile) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.type.name != "F32" or tensor.size_bytes > 4 * ROPE_FREQS_MAX:
        raise ModelError(
            f"{file.path}: {ROPE_FREQS} is {tensor.type.name} of {tensor.size_bytes} bytes,"
            f" not F32 of at most {4 * ROPE_FREQS_MAX}; convert the model again"
        )
    return struct.unpack_from(f"<{tensor.size_bytes // 4}f", file.data, tensor.offset)


def _stop_tokens(file: GGUFFile) -> Iterator[int]:
    for name in ("eos", "eot", "eom"):
        token = _token_id(file, name)
        if token is not None:
            yield token


def _token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < SIZE_MAX else None
