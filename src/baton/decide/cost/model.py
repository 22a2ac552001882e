"""What a language model asks of hardware: weights, matrix products, attention and KV bytes, from its shape alone."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Format = Literal["bf16", "fp8", "int8", "int4"]
"""How numbers are stored. int4 is weights only: computed in bf16 after unpacking."""
KVFormat = Literal["bf16", "fp8", "int8"]
"""How the numbers of KV are stored."""

FORMAT_BYTES: dict[Format, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53}
"""Bytes per number. int4 with a 16-bit scale for every group of 128 and some zero points."""


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
    """Experts that every token visits."""
    dense_layers: int = 0
    """Leading layers with an ordinary MLP of the model's `ffn`."""
    nodes_max: int = 0
    """Nodes that the experts of one token may lie on. 0: no limit."""

    def idle_ratio(self, tokens: float) -> float:
        """Share of the routed experts that none of so many tokens chooses, choosing evenly: they stay unread."""
        return (1 - self.active / self.experts) ** tokens


class ModelShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer in the sizes that its cost depends on."""

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
    """What it was trained for. 0: not told."""
    latent: LatentShape | None = None
    experts: ExpertShape | None = None

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is experts."""
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
        """Embedding, and the head where it is not the same."""
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
        """All weights. Norms, biases and learned positions are left out: under half a percent."""
        return self._params(self.experts.experts if self.experts else 0)

    def read_params(self, tokens: float) -> float:
        """Weights that a step of so many tokens reads: of the routed experts, only those that get one."""
        experts = self.experts
        unread = self.expert_layers * experts.experts * experts.idle_ratio(tokens) if experts else 0.0
        return self.params - unread * self.expert_params

    @property
    def active_params(self) -> int:
        """Weights that one token meets."""
        return self._params(self.experts.active if self.experts else 0)

    def kv_values(self) -> int:
        """Numbers that one token keeps in the cache of one layer."""
        if self.latent is not None:
            return self.latent.kv_lora + self.latent.rope
        return 2 * self.kv_heads * self.head_dim

    def kv_token_bytes(self, kv_format: KVFormat = "bf16") -> float:
        """Bytes that one token keeps in the cache, over all layers."""
        return self.layers * self.kv_values() * FORMAT_BYTES[kv_format]

    def pair_flops(self) -> float:
        """FLOP per layer of one query looking at one key of a prompt.

        MLA expands its latent for prompts: 192 values to compare and 128 to add up per head, not 576 and 512.
        """
        if self.latent is not None:
            return 2.0 * self.heads * (self.latent.nope + self.latent.rope + self.latent.v)
        return 4.0 * self.heads * self.head_dim

    def prompt_flops(self, tokens: int) -> float:
        """FLOP of a whole prompt, embedding and head left out."""
        each = 2.0 * (self.active_params - self.embedding_params)
        return each * tokens + self.layers * self.pair_flops() * tokens**2 / 2

    def problems(self) -> list[str]:
        """Everything that is wrong with the sizes. Empty: it can be computed with."""
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
