"""Read a model's shape from a Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.core.errors import ConfigError
from baton.decide.cost.model import ExpertShape, LatentShape, ModelShape

_UNGATED = ("opt", "bloom", "gpt2", "gpt_neox", "falcon", "phi")
"""Families whose MLP has no gate, and so two matrices."""
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "d": ("hidden_size", "n_embed", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_FFN = ("intermediate_size", "ffn_dim", "n_inner")


def shape_from_config(text: str, *, name: str) -> ModelShape:
    """Return the shape. Raise ConfigError with every key that is missing or inconsistent."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: not a JSON object: {error}") from error
    sizes = {ours: _first(raw, theirs) for ours, theirs in _NAMES.items()}
    missing = [
        f"{name}: has none of the keys {', '.join(_NAMES[ours])}" for ours, size in sizes.items() if size is None
    ]
    if missing:
        raise ConfigError("\n".join(missing))
    layers, d, heads, vocab = (size or 0 for size in sizes.values())
    family = str(raw.get("model_type", ""))
    shape = ModelShape(
        name=name,
        layers=layers,
        d=d,
        ffn=_first(raw, _FFN) or 4 * d,
        heads=heads,
        kv_heads=_first(raw, ("num_key_value_heads",)) or heads,
        head_dim=_first(raw, ("head_dim",)) or (d // heads if heads else 0),
        vocab=vocab,
        gated=not family.startswith(_UNGATED),
        tied=bool(raw.get("tie_word_embeddings", family.startswith(("opt", "bloom", "gpt2")))),
        context_tokens_max=_first(raw, ("max_position_embeddings", "seq_length")) or 0,
        latent=_latent(raw),
        experts=_experts(raw),
    )
    problems = shape.problems()
    if problems:
        raise ConfigError("\n".join(problems))
    return shape


def _first(raw: dict[str, Any], names: tuple[str, ...]) -> int | None:
    found = [raw[name] for name in names if isinstance(raw.get(name), int)]
    return found[0] if found else None


def _latent(raw: dict[str, Any]) -> LatentShape | None:
    if _first(raw, ("kv_lora_rank",)) is None:
        return None
    return LatentShape(
        q_lora=_first(raw, ("q_lora_rank",)) or 0,
        kv_lora=_first(raw, ("kv_lora_rank",)) or 0,
        rope=_first(raw, ("qk_rope_head_dim",)) or 64,
        nope=_first(raw, ("qk_nope_head_dim",)) or 128,
        v=_first(raw, ("v_head_dim",)) or 128,
    )


def _experts(raw: dict[str, Any]) -> ExpertShape | None:
    count = _first(raw, ("n_routed_experts", "num_local_experts", "num_experts"))
    if not count:
        return None
    return ExpertShape(
        experts=count,
        active=_first(raw, ("num_experts_per_tok",)) or 1,
        ffn=_first(raw, ("moe_intermediate_size", "intermediate_size")) or 0,
        shared=_first(raw, ("n_shared_experts",)) or 0,
        dense_layers=_first(raw, ("first_k_dense_replace",)) or 0,
        nodes_max=_first(raw, ("topk_group",)) or 0,
    )
