"""What the forward pass needs to know of a model, whatever file said it. No weights and no torch here."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The name in config.json, and ours."""
LAYERS_MAX = 1024
"""More than any model has: a damaged file must not make us list tensors until memory ends."""


class RopeScaling(Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched to a longer context."""

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_tokens: int = 0
    """Context of the pre-training; llama3 and yarn only."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosine and sine. 1 except with yarn."""
    truncate: bool = True
    """yarn: round the corrected range of dimensions outwards to whole ones."""
    frequency_divisors: tuple[float, ...] = ()
    """From GGUF's `rope_freqs`: each frequency is divided by its own factor."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_tokens: int
    rms_eps: float
    rope_theta: float
    rope: RopeScaling
    context_tokens: int
    tied_embeddings: bool
    """The output projection is the embedding table."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before the rotation (Qwen3)."""
    windows: tuple[int | None, ...]
    """One entry per layer: how many tokens back it sees, its own included. None sees all."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """List every tensor that the model must have, by its name in a Hugging Face checkpoint, with its shape."""
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_tokens, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_tokens, hidden)
    linears = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (config.intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, biased) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
