"""What the forward pass needs to know of a model, whatever file said it. No weights and no torch here."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ExpertScoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "best_two"]
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek3",
}
"""The name in config.json, and ours."""
EXPERTS_MAX = 4096
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


class Experts(Struct, frozen=True, kw_only=True):
    """A mixture of experts: in some layers the MLP is many small ones, and a router picks a few of them per token."""

    layers: tuple[int, ...]
    """Layers that have experts; the others have one MLP."""
    count: int
    used: int
    """Experts per token."""
    intermediate: int
    scoring: ExpertScoring = "softmax"
    normalized: bool
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Multiplies the weights, after that."""
    groups: int = 1
    groups_used: int = 1
    """A token's experts all come from so many groups, the highest scored ones."""
    group_score: GroupScore = "best"
    """What a group's score is: its best expert's, or the sum of its best two."""
    biased_choice: bool = False
    """A learned bias is added to the scores for the choice of experts, and not to their weights (DeepSeek-V3)."""
    shared_intermediate: int = 0
    """Width of the MLP that every token passes beside its experts. 0: there is none."""
    shared_gate: bool = False
    """That MLP's output is scaled by the sigmoid of a projection (Qwen2-MoE)."""


class Latent(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: what is cached of a token is one vector for all heads, not keys and values.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    q_rank: int | None
    """Queries come through a bottleneck of this width. None: straight from the hidden state."""
    kv_rank: int
    """Width of the cached vector that keys and values are projected from."""
    rope_dim: int
    """Dimensions with positions: cached after it, rotated, and shared by all heads."""
    nope_dim: int
    """Dimensions of a head's key without positions."""
    value_dim: int
    score_scale: float
    """Multiplies scores before the softmax."""
    rope_pairs: bool
    """The file pairs rotary dimension 2i with 2i + 1, not i with i + rope_dim / 2."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder with RMSNorm, rotary positions, grouped-query or latent attention, gated SiLU MLPs or experts."""

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
    experts: Experts | None = None
    latent: Latent | None = None
    """Where set, `kv_heads` is 1 and `head_dim` the width of what is cached."""

    @property
    def window_tokens(self) -> int | None:
        """The widest window, where every layer has one. What is behind it no layer of any later token looks at."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Values of one head's attention output."""
        return self.head_dim if self.latent is None else self.latent.value_dim
