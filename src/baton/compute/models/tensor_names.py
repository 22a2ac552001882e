"""The names of a model's tensors in a Hugging Face checkpoint, and their shapes."""

from __future__ import annotations

from dataclasses import dataclass

from baton.compute.models.model_config import Experts, Latent, ModelConfig

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the parts of a mixture of experts, below `model.layers.N.`."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"

    def expert(self, index: int) -> tuple[str, str, str]:
        """Return the names of one expert's gate, up and down projections."""
        prefix = f"{self.experts}.{index}."
        return prefix + self.gate, prefix + self.up, prefix + self.down


def expert_names(architecture: str) -> ExpertNames:
    match architecture:
        case "mixtral":
            moe = "block_sparse_moe"
            return ExpertNames(router=f"{moe}.gate", experts=f"{moe}.experts", gate="w1", up="w3", down="w2")
        case "qwen2moe":
            return ExpertNames(shared="mlp.shared_expert")
        case _:
            return ExpertNames()


def expected_shapes(config: ModelConfig) -> Shapes:
    """Return the name and shape of every tensor that the model must have."""
    hidden = config.hidden
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_tokens, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_tokens, hidden)
    for layer in range(config.layers):
        attention = _grouped(config) if config.latent is None else _latent(config, config.latent)
        routed = config.experts is not None and layer in config.experts.layers
        mlp = _experts(config, config.experts) if routed and config.experts else _dense(config)
        norms: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (attention | mlp | norms).items()}
    return shapes


def _linear(name: str, rows: int, columns: int, *, biased: bool = False) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if biased else weight


def _grouped(config: ModelConfig) -> Shapes:
    hidden, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms: Shapes = {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"} if config.qk_norm else {}
    return (
        _linear("self_attn.q_proj", q, hidden, biased=config.qkv_bias)
        | _linear("self_attn.k_proj", kv, hidden, biased=config.qkv_bias)
        | _linear("self_attn.v_proj", kv, hidden, biased=config.qkv_bias)
        | _linear("self_attn.o_proj", hidden, q, biased=config.o_bias)
        | norms
    )


def _latent(config: ModelConfig, latent: Latent) -> Shapes:
    hidden, heads = config.hidden, config.heads
    q = heads * (latent.nope_dim + latent.rope_dim)
    kv = heads * (latent.nope_dim + latent.value_dim)
    if latent.q_rank is None:
        queries = _linear("self_attn.q_proj", q, hidden)
    else:
        queries = (
            _linear("self_attn.q_a_proj", latent.q_rank, hidden, biased=config.qkv_bias)
            | {"self_attn.q_a_layernorm.weight": (latent.q_rank,)}
            | _linear("self_attn.q_b_proj", q, latent.q_rank)
        )
    return (
        queries
        | _linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, hidden, biased=config.qkv_bias)
        | {"self_attn.kv_a_layernorm.weight": (latent.kv_rank,)}
        | _linear("self_attn.kv_b_proj", kv, latent.kv_rank)
        | _linear("self_attn.o_proj", hidden, heads * latent.value_dim, biased=config.o_bias)
    )


def _dense(config: ModelConfig) -> Shapes:
    hidden, inner, biased = config.hidden, config.intermediate, config.mlp_bias
    return (
        _linear("mlp.gate_proj", inner, hidden, biased=biased)
        | _linear("mlp.up_proj", inner, hidden, biased=biased)
        | _linear("mlp.down_proj", hidden, inner, biased=biased)
    )


def _experts(config: ModelConfig, experts: Experts) -> Shapes:
    names, hidden = expert_names(config.architecture), config.hidden
    shapes = _linear(names.router, experts.count, hidden)
    if experts.biased_choice:
        shapes[names.choice_bias] = (experts.count,)
    for index in range(experts.count):
        gate, up, down = names.expert(index)
        shapes |= _linear(gate, experts.intermediate, hidden) | _linear(up, experts.intermediate, hidden)
        shapes |= _linear(down, hidden, experts.intermediate)
    if experts.shared_intermediate:
        width = experts.shared_intermediate
        shapes |= _linear(f"{names.shared}.gate_proj", width, hidden) | _linear(
            f"{names.shared}.up_proj", width, hidden
        )
        shapes |= _linear(f"{names.shared}.down_proj", hidden, width)
    if experts.shared_gate:
        shapes |= _linear(names.shared_gate, 1, hidden)
    return shapes
