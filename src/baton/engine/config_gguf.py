"""Read a model's sizes from the metadata of a GGUF file, and the names of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from baton.core.errors import ModelError
from baton.engine.config_json import yarn_attention_factor
from baton.engine.gguf_file import GGUFFile
from baton.engine.model_config import LAYERS_MAX, ModelConfig, RopeScaling
from baton.engine.tensor_names import expected_shapes

GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Translate a Hugging Face tensor name: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def read_config_gguf(file: GGUFFile) -> ModelConfig:
    """Read the model's sizes. Raises ModelError for an architecture or an option that Baton does not compute."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the architecture {architecture}; Baton serves {', '.join(GGUF_ARCHITECTURES)}"
        )
    keys = _Keys(file, str(architecture))
    if keys.integer("expert_count", 0):
        raise ModelError(
            f"{file.path} is a mixture of experts; Baton serves dense models of {', '.join(GGUF_ARCHITECTURES)}"
        )
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
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"{file.path} rotates {rotated} of {head_dim} dimensions; Baton rotates whole heads")
    window = keys.integer("attention.sliding_window", 0) if architecture in ("llama", "mistral") else 0
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight; it is no whole model (a shard or an adapter?)")
    return ModelConfig(
        architecture=str(architecture),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.integer("feed_forward_length"),
        vocab_tokens=embedding.shape[0],
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-5),
        rope_theta=keys.number("rope.freq_base", 10_000.0),
        rope=_rope(keys),
        context_tokens=keys.integer("context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        windows=(window or None,) * layers,
        eos_token_ids=tuple(dict.fromkeys(_stop_tokens(file))),
        bos_token_id=_token_id(file, "bos"),
    )


def gguf_shapes(file: GGUFFile, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return (expected, found) shapes, both under Hugging Face names, for `resolve` to compare."""
    expected = expected_shapes(config)
    found = {name: file.tensors[gguf_name(name)].shape for name in expected if gguf_name(name) in file.tensors}
    return expected, found


class _Keys:
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


def _rope(keys: _Keys) -> RopeScaling:
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
            attention_factor=keys.number("rope.scaling.attn_factor", 1.0) * yarn_attention_factor(factor),
            frequency_divisors=divisors,
        )
    if kind not in ("none", "linear"):
        raise ModelError(f"{keys.file.path}: rope scaling {kind}; Baton computes none, linear, yarn and rope_freqs")
    return RopeScaling(kind="linear" if factor != 1.0 else "default", factor=factor, frequency_divisors=divisors)


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
