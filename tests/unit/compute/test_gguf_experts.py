"""GGUF files of mixtures of experts and latent attention, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import load_file

from baton.compute.models.bfloat16 import to_float32
from baton.compute.models.gguf_file import open_gguf
from baton.compute.models.gguf_names import GGUFName, gguf_name, split_kv_b
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.models.weights_gguf import GGUFWeights
from baton.core.errors import ModelError
from tests.numerics.test_architectures import CONFIGS, DEEPSEEK_YARN, LATENT, TOKENS
from tests.unit.compute.models import (
    VOCAB,
    add_sizes,
    all_logprobs,
    close_gguf,
    engine_of,
    huggingface_logprobs,
    tiny_model,
)

EVEN_YARN = DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
FILES: dict[str, tuple[str, transformers.PretrainedConfig]] = {
    "mixtral": ("llama", CONFIGS["mixtral"]),
    "qwen2moe": ("qwen2moe", CONFIGS["qwen2moe"]),
    "qwen3moe": ("qwen3moe", transformers.Qwen3MoeConfig(**CONFIGS["qwen3moe"].to_dict() | {"norm_topk_prob": True})),
    "deepseek2_lite": ("deepseek2", CONFIGS["deepseek2_lite"]),
    "deepseek2_yarn_split": (
        "deepseek2",
        transformers.DeepseekV2Config(**LATENT, rope_parameters=EVEN_YARN, q_lora_rank=20),
    ),
    "deepseek3_split": ("deepseek2", CONFIGS["deepseek3"]),
}


def _write(model: transformers.PreTrainedModel, architecture: str, folder: Path, *, split: bool) -> Path:
    model.save_pretrained(folder)
    path, config = folder / "model.gguf", read_config(resolve_model(str(folder)))
    writer = gguf.GGUFWriter(path, architecture)
    add_sizes(writer, model.config)
    _add_expert_sizes(writer, config)
    if config.latent is not None:
        _add_latent_sizes(writer, config, model.config, split=split)
    elif architecture.startswith("qwen3"):
        writer.add_key_length(config.head_dim)
    for name, weight in _tensors(config, load_file(folder / "model.safetensors")).items():
        if split and name.tensor.endswith("attn_kv_b.weight") and config.latent is not None:
            rows = weight.reshape(config.heads, -1, config.latent.kv_rank)
            keys, values = np.split(rows, [config.latent.nope_dim], axis=1)
            for part, data in zip(split_kv_b(name), (keys.swapaxes(1, 2), values), strict=True):
                writer.add_tensor(part, np.ascontiguousarray(data))
        else:
            writer.add_tensor(name.tensor, np.ascontiguousarray(weight.squeeze() if weight.shape[0] == 1 else weight))
    close_gguf(writer)
    return path


def _tensors(config: ModelConfig, tensors: dict[str, np.ndarray]) -> dict[GGUFName, np.ndarray]:
    """Stack experts; interleave query and key rows where llama.cpp pairs neighbours."""
    found: dict[GGUFName, list[np.ndarray]] = {}
    for name in expected_shapes(config):
        weight = tensors[name]
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if heads is not None and config.architecture == "mixtral":
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
        place = gguf_name(name)
        found.setdefault(GGUFName(place.tensor, None if place.expert is None else 0), []).append(weight)
    return {name: parts[0] if name.expert is None else np.stack(parts) for name, parts in found.items()}


def _add_expert_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    experts = config.experts
    assert experts is not None
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    if config.architecture != "mixtral":
        writer.add_expert_feed_forward_length(experts.intermediate)
    if config.architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(experts.shared_intermediate)
    if config.latent is not None:
        writer.add_leading_dense_block_count(experts.layers[0])
        writer.add_expert_shared_count(experts.shared_intermediate // experts.intermediate)
        writer.add_expert_weights_scale(experts.scale)
        writer.add_expert_weights_norm(experts.normalized)
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SIGMOID if experts.scoring == "sigmoid" else kinds.SOFTMAX)
        if experts.groups > 1:
            writer.add_expert_group_count(experts.groups)
            writer.add_expert_group_used_count(experts.groups_used)


def _add_latent_sizes(
    writer: gguf.GGUFWriter, config: ModelConfig, theirs: transformers.PretrainedConfig, *, split: bool
) -> None:
    latent = config.latent
    assert latent is not None
    writer.add_kv_lora_rank(latent.kv_rank)
    if latent.q_rank is not None:
        writer.add_q_lora_rank(latent.q_rank)
    writer.add_rope_dimension_count(latent.rope_dim)
    sizes = (latent.nope_dim + latent.rope_dim, latent.value_dim)
    if split:
        writer.add_key_length_mla(sizes[0])
        writer.add_value_length_mla(sizes[1])
        sizes = (latent.kv_rank + latent.rope_dim, latent.kv_rank)
    writer.add_key_length(sizes[0])
    writer.add_value_length(sizes[1])
    if config.rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_context_tokens)
        writer.add_rope_scaling_yarn_log_mul(0.1 * theirs.rope_parameters["mscale_all_dim"])


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_gives_the_log_probabilities_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = FILES[name]
    model = tiny_model(config)
    path = _write(model, architecture, tmp_path, split="split" in name)
    engine, _ = engine_of(resolve_model(str(path)))
    mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
    np.testing.assert_allclose(mine, huggingface_logprobs(model, TOKENS), atol=2e-4, rtol=0)


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.F16], ids=lambda quant: quant.name)
def test_one_expert_is_cut_out_of_a_quantized_stack(quant: Quant, tmp_path: Path) -> None:
    """Reading an expert uses the bytes of this expert only, for every index."""
    config = transformers.Qwen3MoeConfig(**CONFIGS["qwen3moe"].to_dict() | {"hidden_size": 64, "norm_topk_prob": True})
    path = _write(tiny_model(config), "qwen3moe", tmp_path, split=False)
    ours = read_config(resolve_model(str(path)))
    stack = np.random.default_rng(1).standard_normal((8, 24, 64), dtype=np.float32)
    raw = gguf.quants.quantize(stack, quant)
    writer = gguf.GGUFWriter(tmp_path / "stack.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", raw, raw_dtype=quant)
    close_gguf(writer)
    weights, expected = GGUFWeights(open_gguf(tmp_path / "stack.gguf"), ours), gguf.quants.dequantize(raw, quant)
    for expert in range(8):
        name = f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"
        np.testing.assert_array_equal(to_float32(weights.read(name)), expected[expert])
        codes = weights.read_quantized(name)
        assert (codes is None) == (quant == Quant.F16)
        if codes is not None:
            np.testing.assert_array_equal(codes.dense(), expected[expert])


def test_invalid_sizes_are_refused(tmp_path: Path) -> None:
    """More experts per token than there are."""
    path = _write(tiny_model(FILES["qwen2moe"][1]), "qwen2moe", tmp_path, split=False)
    data, key = path.read_bytes(), b"qwen2moe.expert_used_count\x04\x00\x00\x00"
    assert data.count(key + b"\x02") == 1
    path.write_bytes(data.replace(key + b"\x02", key + b"\x09"))
    with pytest.raises(ModelError, match=r"9 of 8 experts from 1 of 1 groups of width 24 do not fit together"):
        resolve_model(str(path))
