"""Read a model's sizes from the metadata of a GGUF file, and the names of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from baton.compute.models.config_gguf_parts import YARN_LOG, GGUFKeys, experts_of, latent_of
from baton.compute.models.config_json import yarn_attention_factor
from baton.compute.models.gguf_file import GGUFFile
from baton.compute.models.gguf_names import GGUFName, gguf_name, split_kv_b
from baton.compute.models.model_config import LAYERS_MAX, Experts, ModelConfig, RopeScaling
from baton.compute.models.tensor_names import expected_shapes
from baton.core.errors import ModelError

GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "deepseek2")
ROPE_FREQS = "rope_freqs.weight"


def read_config_gguf(file: GGUFFile) -> ModelConfig:
    """Read the model's sizes. Raises ModelError for an architecture or an option that Baton does not compute."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {architecture}; Baton serves {', '.join(GGUF_ARCHITECTURES)}"
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
    latent = latent_of(keys)
    rotated, rotary_dim = keys.integer("rope.dimension_count", head_dim), latent.rope_dim if latent else head_dim
    if rotated != rotary_dim:
        raise ModelError(f"{file.path} rotates {rotated} of {rotary_dim} dimensions; Baton rotates whole heads")
    window = keys.integer("attention.sliding_window", 0) if architecture in ("llama", "mistral") else 0
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is no whole model (a shard or an adapter?)")
    experts = experts_of(keys, layers)
    return ModelConfig(
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


def _family(architecture: str, experts: Experts | None) -> str:
    """Tell apart what GGUF files have one name for."""
    if architecture == "llama" and experts is not None:
        return "mixtral"
    if architecture == "deepseek2" and experts is not None and experts.scoring == "sigmoid":
        return "deepseek3"
    return architecture


def gguf_shapes(file: GGUFFile, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return (expected, found) shapes, both under Hugging Face names, for `resolve` to compare."""
    expected = expected_shapes(config)
    found = {name: _shape(file, gguf_name(name)) for name in expected}
    return expected, {name: shape for name, shape in found.items() if shape is not None}


def _shape(file: GGUFFile, name: GGUFName) -> tuple[int, ...] | None:
    """Return the shape that a tensor has once it is read. None: the file does not have it."""
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
        raise ModelError(f"{keys.file.path}: rope scaling {kind}; Baton computes none, linear, yarn and rope_freqs")
    return RopeScaling(kind="linear" if factor != 1.0 else "default", factor=factor, frequency_divisors=divisors)


def _attention_factor(keys: GGUFKeys, factor: float) -> float:
    """DeepSeek tempers scores instead: see `latent_of`."""
    return 1.0 if keys.number(YARN_LOG, 0.0) else yarn_attention_factor(factor)


def _frequency_divisors(file: GGUFFile) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.type.name != "F32":
        raise ModelError(f"{file.path}: {ROPE_FREQS} is {tensor.type.name}, not F32; convert the model again")
    return struct.unpack_from(f"<{tensor.size_bytes // 4}f", file.data, tensor.offset)


def _stop_tokens(file: GGUFFile) -> Iterator[int]:
    for name in ("eos", "eot", "eom"):
        token = _token_id(file, name)
        if token is not None:
            yield token


def _token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None
