"""The configuration of a model as the forward pass needs it, in one form for all file formats. No torch."""

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
"""Architecture names: that of config.json, and the one used by Baton."""
EXPERTS_MAX = 4096
LAYERS_MAX = 1024
"""Above any real model. Keeps the list of tensors of a damaged file small."""


class RopeScaling(Struct, frozen=True, kw_only=True):
    """The scaling of rotary frequencies to a longer context."""

    kind: RopeKind = "default"
    factor: float = 1.0
    original_context_tokens: int = 0
    """The context length of the pre-training. llama3 and yarn only."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """The factor on cosine and sine. 1 except with yarn."""
    truncate: bool = True
    """yarn: round the range of blended dimensions outwards to whole numbers."""
    frequency_divisors: tuple[float, ...] = ()
    """From GGUF's `rope_freqs`: the divisor of each frequency. Empty: no division."""


class Experts(Struct, frozen=True, kw_only=True):
    """A mixture of experts: some layers have many small MLPs, and a router chooses a few of them for each token."""

    layers: tuple[int, ...]
    """The layers with experts. Other layers have one MLP."""
    count: int
    used: int
    """The number of experts that compute a token."""
    intermediate: int
    """The width of one expert's MLP."""
    scoring: ExpertScoring = "softmax"
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """The factor on the weights after normalization."""
    groups: int = 1
    groups_used: int = 1
    """The experts of a token come from the `groups_used` groups with the highest scores."""
    group_score: GroupScore = "best"
    """The score of a group: the score of its best expert, or the sum of its two best."""
    biased_choice: bool = False
    """Whether a learned bias is added to the scores that choose experts, but not to their weights (DeepSeek-V3)."""
    shared_intermediate: int = 0
    """The width of the shared MLP, which computes every token. 0: there is none."""
    shared_gate: bool = False
    """Whether the sigmoid of a projection scales the output of the shared MLP (Qwen2-MoE)."""


class Latent(Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: the cache holds one vector per token for all heads, not keys and values.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    q_rank: int | None
    """The width of the bottleneck before the queries. None: queries are projected from the hidden state."""
    kv_rank: int
    """The width of the cached vector that keys and values are projected from."""
    rope_dim: int
    """Dimensions of a key with rotary positions. They are cached after the vector, and shared by all heads."""
    nope_dim: int
    """Dimensions of a head's key without positions."""
    value_dim: int
    score_scale: float
    """The factor on scores before the softmax."""
    rope_pairs: bool
    """Whether the file pairs rotary dimension 2i with 2i + 1, instead of i with i + rope_dim / 2."""


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
    """Whether the output projection is the embedding table."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalized over head_dim before the rotation (Qwen3)."""
    windows: tuple[int | None, ...]
    """The attention window of each layer in tokens, a token's own position included. None: no window."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    experts: Experts | None = None
    latent: Latent | None = None
    """If set, `kv_heads` is 1, and `head_dim` is the width of the cached vector."""

    @property
    def window_tokens(self) -> int | None:
        """The widest window if every layer has one, else None. No later token reads the KV behind it."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head with rotary positions."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """The number of values of one head's attention output."""
        return self.head_dim if self.latent is None else self.latent.value_dim
