"""Requirements of a language model, computed from its shape: weights, matrix products, attention and KV bytes.

The shape is given, or read from a Hugging Face `config.json`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError

Format = Literal["bf16", "fp8", "int8", "int4"]
"""Number formats. int4 is for weights only: they are unpacked and computed in bf16."""
KVFormat = Literal["bf16", "fp8", "int8"]
"""Number formats of KV."""

FORMAT_BYTES: dict[Format, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53}
"""Bytes per number. int4 includes a 16-bit scale per group of 128, and zero points."""

_UNGATED = ("opt", "bloom", "gpt2", "gpt_neox", "falcon", "phi")
"""Families whose MLP has no gate, and so two matrices."""
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "d": ("hidden_size", "n_embed", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_FFN = ("intermediate_size", "ffn_dim", "n_inner")


class LatentShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek V2, V3): one compressed vector per token serves all heads."""

    q_lora: int = 1536
    """Rank of the query's compression. 0: none."""
    kv_lora: int = 512
    rope: int = 64
    """Values of the key that carry positions, shared by all heads."""
    nope: int = 128
    v: int = 128


class ExpertShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of a mixture-of-experts model."""

    experts: int
    active: int
    """Routed experts that each token visits."""
    ffn: int
    """Width of one expert."""
    shared: int = 0
    """Shared experts, which every token visits."""
    dense_layers: int = 0
    """Leading layers with an ordinary MLP of the model's `ffn`."""
    nodes_max: int = 0
    """Maximum number of nodes over which the experts of one token are spread. 0: no limit."""

    def idle_ratio(self, tokens: float) -> float:
        """Return the share of routed experts that no token chooses, for uniform choices. Their weights are not read."""
        return (1 - self.active / self.experts) ** tokens


class ModelShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of a decoder-only transformer that determine its cost."""

    name: str
    layers: int
    d: int
    """Width of the residual stream."""
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """The MLP has a gate beside `up` (SwiGLU), so three matrices instead of two."""
    tied: bool = False
    """Embedding and head share their weights."""
    context_tokens_max: int = 0
    """Training context. 0: unknown."""
    latent: LatentShape | None = None
    experts: ExpertShape | None = None

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention."""
        d, latent = self.d, self.latent
        if latent is None:
            return d * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        query = latent.nope + latent.rope
        q = d * latent.q_lora + latent.q_lora * self.heads * query if latent.q_lora else d * self.heads * query
        kv = d * (latent.kv_lora + latent.rope) + latent.kv_lora * self.heads * (latent.nope + latent.v)
        return q + kv + self.heads * latent.v * d

    @property
    def mlp_params(self) -> int:
        """Weights of one dense MLP."""
        return self.d * self.ffn * (3 if self.gated else 2)

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return 3 * self.d * self.experts.ffn if self.experts else 0

    @property
    def embedding_params(self) -> int:
        """Weights of the embedding, and of the head unless they are tied."""
        return self.vocab * self.d * (1 if self.tied else 2)

    def _params(self, experts_each: int) -> int:
        dense = self.layers - self.expert_layers
        router = self.d * self.experts.experts if self.experts else 0
        shared = self.experts.shared if self.experts else 0
        expert_layer = router + (experts_each + shared) * self.expert_params
        blocks = self.layers * self.attention_params + dense * self.mlp_params + self.expert_layers * expert_layer
        return blocks + self.embedding_params

    @property
    def params(self) -> int:
        """All weights, without norms, biases and learned positions (less than half a percent)."""
        return self._params(self.experts.experts if self.experts else 0)

    def read_params(self, tokens: float) -> float:
        """Return the weights that a step of this many tokens reads. Experts that no token chooses are not read."""
        experts = self.experts
        unread = self.expert_layers * experts.experts * experts.idle_ratio(tokens) if experts else 0.0
        return self.params - unread * self.expert_params

    @property
    def active_params(self) -> int:
        """Weights that are used for one token."""
        return self._params(self.experts.active if self.experts else 0)

    def kv_values(self) -> int:
        """Return the KV values of one token in one layer."""
        if self.latent is not None:
            return self.latent.kv_lora + self.latent.rope
        return 2 * self.kv_heads * self.head_dim

    def kv_token_bytes(self, kv_format: KVFormat = "bf16") -> float:
        """Return the KV bytes of one token over all layers."""
        return self.layers * self.kv_values() * FORMAT_BYTES[kv_format]

    def pair_flops(self) -> float:
        """Return the FLOP per layer and (query, key) pair of a prompt.

        MLA expands its latent for prompts: 192 values to compare and 128 to sum per head, not 576 and 512.
        """
        if self.latent is not None:
            return 2.0 * self.heads * (self.latent.nope + self.latent.rope + self.latent.v)
        return 4.0 * self.heads * self.head_dim

    def prompt_flops(self, tokens: int) -> float:
        """Return the FLOP of a whole prompt, without embedding and head."""
        each = 2.0 * (self.active_params - self.embedding_params)
        return each * tokens + self.layers * self.pair_flops() * tokens**2 / 2

    def problems(self) -> list[str]:
        """Return every problem of the sizes. Empty: they are valid."""
        sizes = {"layers": self.layers, "d": self.d, "ffn": self.ffn, "heads": self.heads, "vocab": self.vocab}
        sizes |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
        found = [f"{self.name}: {name} is {size}, but must be at least 1" for name, size in sizes.items() if size < 1]
        if not found and self.heads % self.kv_heads:
            found.append(f"{self.name}: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        experts = self.experts
        if experts and not 1 <= experts.active <= experts.experts:
            found.append(f"{self.name}: {experts.active} active of {experts.experts} experts: at least 1, at most all")
        if experts and not 0 <= experts.dense_layers < self.layers:
            found.append(f"{self.name}: {experts.dense_layers} dense layers of {self.layers}: some must have experts")
        return found


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
