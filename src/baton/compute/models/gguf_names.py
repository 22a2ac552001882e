"""Translate Hugging Face tensor names to GGUF names. In GGUF, all experts of a layer are one tensor."""

from __future__ import annotations

from dataclasses import dataclass

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
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_CHOICE_BIAS = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class GGUFName:
    """The name of a tensor, and the index of an expert in its first dimension. None: the whole tensor."""

    tensor: str
    expert: int | None = None


def gguf_name(name: str) -> GGUFName:
    """Return the GGUF name of a Hugging Face tensor.

    Example: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`.
    """
    if name in _TOP_NAMES:
        return GGUFName(_TOP_NAMES[name])
    _, _, layer, rest = name.split(".", 3)
    if rest == _CHOICE_BIAS:
        return GGUFName(f"blk.{layer}.exp_probs_b.bias")
    module, kind = rest.rsplit(".", 1)
    if module in _LAYER_NAMES:
        return GGUFName(f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}")
    group, part = module.rsplit(".", 1)
    if group in ("mlp.shared_expert", "mlp.shared_experts"):
        return GGUFName(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_shexp.{kind}")
    expert = int(group.rsplit(".", 1)[1])  # `mlp.experts.5` or `block_sparse_moe.experts.5`
    return GGUFName(f"blk.{layer}.ffn_{_EXPERT_PARTS[part]}_exps.{kind}", expert)


def split_kv_b(name: GGUFName) -> tuple[str, str]:
    """Return the names of the two tensors that newer files have instead of `attn_kv_b`.

    `attn_k_b` is [heads, kv_rank, nope_dim], transposed for absorption; `attn_v_b` is [heads, value_dim, kv_rank].
    """
    return name.tensor.replace("attn_kv_b", "attn_k_b"), name.tensor.replace("attn_kv_b", "attn_v_b")
