"""The configuration of a model as the forward pass needs it, in one form for all file formats. No torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from baton.core.errors import ModelError

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
EXPERTS_MAX, EXPERTS_IN_ALL_MAX = 4096, 1 << 17
"""Maximum number of experts of one layer, and of all layers together: five times those of the largest known model."""
SIZE_MAX, CONTEXT_TOKENS_MAX = 1 << 24, 1 << 31
LAYERS_MAX = 1024
"""Maximum number of layers, above that of any real model. Keeps the list of tensors of a damaged file small."""


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
    per_token: int = field(name="used")
    """Number of experts that compute a token.

    Encoded as `used`, because the fingerprint of stored KV depends on that name.
    """
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
    """Latent attention. None: grouped queries. If set, `kv_heads` is 1, and `head_dim` is the width of the vector."""

    @property
    def window_tokens(self) -> int | None:
        """The widest window if every layer has one, else None. No later token reads the KV behind it."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that have rotary positions."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """The number of values of one head's attention output."""
        return self.head_dim if self.latent is None else self.latent.value_dim


def check_config(where: Path, config: ModelConfig) -> ModelConfig:
    """Return `config`. Raises ModelError for values that no model can have; the forward pass relies on it."""
    rope, experts, kv_heads = config.rope, config.experts, config.kv_heads
    sizes = {
        "hidden size": config.hidden,
        "heads": config.heads,
        "KV heads": kv_heads,
        "dimensions of a head": config.head_dim,
        "rotary dimensions": config.rotary_dim,
        "MLP width": config.intermediate,
        "tokens": config.vocab_tokens,
        "width of the shared experts": experts.shared_intermediate + 1 if experts else 1,
        "width of an expert": experts.intermediate if experts else 1,
    }
    positive = {
        "RoPE base": config.rope_theta,
        "RoPE factor": rope.factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
    }
    problems = [f"{size} {name}" for name, size in sizes.items() if not 0 < size <= SIZE_MAX]
    problems += [f"{name} {value}" for name, value in positive.items() if not 0 < value < math.inf]
    if not all(0 < divisor < math.inf for divisor in rope.frequency_divisors):
        problems.append("a divisor of a frequency that is not positive and finite")
    if not 0 <= config.rms_eps < 1:
        problems.append(f"rms_norm_eps {config.rms_eps}")
    if not 0 < config.context_tokens <= CONTEXT_TOKENS_MAX:
        problems.append(f"a context of {config.context_tokens} tokens")
    if kv_heads > 0 and config.heads % kv_heads:
        problems.append(f"{config.heads} heads over {kv_heads} KV heads")
    if config.rotary_dim % 2:
        problems.append(f"an odd number of rotary dimensions, {config.rotary_dim}")
    if rope.frequency_divisors and len(rope.frequency_divisors) != config.rotary_dim // 2:
        problems.append(f"{len(rope.frequency_divisors)} divisors for {config.rotary_dim // 2} frequencies")
    if rope.kind in ("llama3", "yarn") and not 0 < rope.original_context_tokens <= CONTEXT_TOKENS_MAX:
        problems.append(f"an original context of {rope.original_context_tokens} tokens")
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor < math.inf:
        problems.append(f"low_freq_factor {rope.low_freq_factor} and high_freq_factor {rope.high_freq_factor}")
    if rope.kind == "yarn" and config.rope_theta <= 1:
        problems.append(f"yarn with the RoPE base {config.rope_theta}")
    if len(config.windows) != config.layers or any(window is not None and window <= 0 for window in config.windows):
        problems.append(f"attention windows of {len(config.windows)} of {config.layers} layers, or one without a token")
    if problems:
        raise ModelError(f"{where} has impossible values: {', '.join(problems)}; use the model's own file")
    return config
