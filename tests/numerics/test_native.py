"""The native engine equals transformers, with every instruction set of this machine and every model option."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers

from baton.compute.models.dtype import Dtype
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import library_path
from baton.compute.native.engine import NativeEngine
from baton.compute.native.library import NativeLibrary
from baton.compute.native.load_native import Computation, load_native_engine
from baton.core.config import WeightsChoice
from baton.core.types import Sampling
from baton.decide.kv.layout import KVDtype
from baton.move.weights_file import WeightsFile
from tests.numerics.test_architectures import CONFIGS, LATENT, TOKENS
from tests.unit.compute.models import TINY, VOCAB, all_logprobs, engine_of, huggingface_logprobs, tiny_model
from tests.unit.compute.native_fuzz import make_weights_file
from tests.unit.compute.steps import part_of, run

FLOAT32_TOLERANCE = 2e-4
"""The absolute tolerance of log probabilities. Only the orders of sums differ."""
STEEP_TOLERANCE = 4e-4
"""The tolerance for a model with large scores, where the torch engine also differs by 1.4e-4 from transformers."""
BFLOAT16_TOLERANCE = 0.3
"""The tolerance with weights and activations, or KV, rounded to 8 bits; the random models have large scores."""
LATENT_TOLERANCE = 0.6
"""The tolerance for latent attention in 8 bits, with two successive products for queries."""
DEEPSEEK_WIDE = transformers.DeepseekV3Config(
    **LATENT
    | {
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_key_value_heads": 20,
        "initializer_range": 0.05,
    },
    q_lora_rank=192,
    n_group=1,
    topk_group=1,
)
"""The sizes of DeepSeek's latents and heads."""
SERVED = CONFIGS | {"deepseek_wide": DEEPSEEK_WIDE}

KERNELS = NativeLibrary(library_path()).usable_kernels()
ONE_OF_SEVEN = transformers.MixtralConfig(**TINY, num_local_experts=7, num_experts_per_tok=1)
ONE_OF_FOUR_GROUPS = transformers.DeepseekV3Config(
    **LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 1, "first_k_dense_replace": 0}, n_group=4, topk_group=1
)


def _engine(folder: Path, kernels: str, dtype: Dtype = "float32", kv_dtype: KVDtype = "float32") -> NativeEngine:
    card = resolve_model(str(folder))
    layout = card.layout(block_tokens=4, dtype=kv_dtype)
    arena = bytearray(b"\xff" * (layout.block_bytes * 20))  # NaN: what was never written must not be read
    library = NativeLibrary(library_path(), kernels)
    return load_native_engine(card, layout, memoryview(arena), library, Computation(dtype=dtype, threads=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_a_request_with_nan_scores_fails_alone(
    kind: Literal["native", "torch"], temperature: float, tmp_path: Path
) -> None:
    """Token 0 gives NaN from the first layer on."""
    model = tiny_model(CONFIGS["llama_untied"])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.inf
    model.save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    engine, _arena = engine_of(card, kind=kind)
    sampling = Sampling(temperature=temperature, seed=1)
    ill = part_of([5, 0, 6], [0], sampling=sampling)
    healthy = part_of([5, 7, 6], [1], sampling=sampling)
    found = run(engine, ill, healthy)
    assert "NaN" in found[0].failure
    assert found[1].failure == ""
    assert found[1] == run(engine_of(card, kind=kind)[0], part_of([5, 7, 6], [1], sampling=sampling))[0]


@pytest.mark.parametrize("name", SERVED)
def test_float32_log_probabilities_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """At every position, for the whole vocabulary, with every instruction set of this machine."""
    model = tiny_model(SERVED[name])
    model.save_pretrained(tmp_path)
    expected = huggingface_logprobs(model, TOKENS)
    tolerance = STEEP_TOLERANCE if name == "deepseek2_yarn" else FLOAT32_TOLERANCE
    for kernels in KERNELS:
        mine = all_logprobs(_engine(tmp_path, kernels), TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=0, err_msg=kernels)


def test_a_gate_below_the_range_of_the_exponential_is_0(tmp_path: Path) -> None:
    """exp(88.7) is the largest number in float32. About every third gate is below -88.7 here."""
    model = tiny_model(CONFIGS["llama_untied"])
    gates: list[torch.Tensor] = []
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.mul_(1000.0)
            layer.mlp.down_proj.weight.div_(1000.0)
            layer.mlp.gate_proj.register_forward_hook(lambda _module, _given, gate: gates.append(gate))
    model.save_pretrained(tmp_path)
    expected = huggingface_logprobs(model, TOKENS)
    assert (torch.cat(gates) < -88.8).float().mean() > 0.2
    for kernels in KERNELS:
        mine = all_logprobs(_engine(tmp_path, kernels), TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=FLOAT32_TOLERANCE, rtol=0, err_msg=kernels)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama_wide_heads", "qwen3", "mistral_window", "qwen2moe_every_expert", "deepseek3_every_expert"]
)
def test_every_precision_is_near_the_exact_model(name: str, dtype: Dtype, kv_dtype: KVDtype, tmp_path: Path) -> None:
    """Every token uses all experts, because rounded scores may change the choice."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    expected = huggingface_logprobs(model, TOKENS)
    tolerance = FLOAT32_TOLERANCE if dtype == kv_dtype == "float32" else BFLOAT16_TOLERANCE
    for kernels in KERNELS:
        mine = all_logprobs(_engine(tmp_path, kernels, dtype, kv_dtype), TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=0, err_msg=kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("config", "firsts", "twins"), [(ONE_OF_SEVEN, [2], [5]), (ONE_OF_FOUR_GROUPS, [2, 3], [6, 7])]
)
def test_the_first_of_native_experts_with_equal_scores_is_chosen(
    config: transformers.PretrainedConfig, firsts: list[int], twins: list[int], dtype: Dtype, tmp_path: Path
) -> None:
    """Experts 2 and 5 have the same row in the router, so no token uses 5. The same holds for groups."""
    model = tiny_model(config)
    layers = [layer.mlp for layer in model.model.layers]

    def seen() -> np.ndarray:
        model.save_pretrained(tmp_path)
        return all_logprobs(_engine(tmp_path, KERNELS[0], dtype), TOKENS, range(18), VOCAB)

    with torch.no_grad():
        for layer in layers:
            layer.gate.weight[twins] = layer.gate.weight[firsts]
            if config is ONE_OF_FOUR_GROUPS:
                layer.gate.e_score_correction_bias[twins] = layer.gate.e_score_correction_bias[firsts]
        before = seen()
        for experts, matters in ((twins, False), (firsts, True)):
            for layer in layers:
                layer.experts.down_proj[experts] *= -1
            assert (seen() != before).any() == matters


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("weights", ["int8", "stored"])
@pytest.mark.parametrize(
    ("name", "tolerance"), [("qwen2moe_every_expert", BFLOAT16_TOLERANCE), ("deepseek3_every_expert", LATENT_TOLERANCE)]
)
def test_experts_and_latents_of_8_bits_are_near_the_exact_model(
    name: str, tolerance: float, weights: WeightsChoice, kv_dtype: KVDtype, tmp_path: Path
) -> None:
    """The file has float weights, which `stored` rounds to 8 bits per run."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype=kv_dtype)
    expected = huggingface_logprobs(model, TOKENS)
    for kernels in KERNELS:
        arena, library = bytearray(layout.block_bytes * 20), NativeLibrary(library_path(), kernels)
        engine = load_native_engine(card, layout, memoryview(arena), library, Computation(weights=weights, threads=1))
        mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
        np.testing.assert_allclose(mine, expected, atol=tolerance, rtol=0, err_msg=kernels)


@pytest.mark.parametrize(
    ("name", "weights"), [("qwen2moe_every_expert", "dense"), ("deepseek3", "dense"), ("llama_untied", "int8")]
)
def test_workers_with_shared_weights_give_the_bits_of_one_with_its_own(
    name: str, weights: WeightsChoice, tmp_path: Path
) -> None:
    """The first one packs them, the second one reads no tensor. The third one has another form, so it packs its own."""
    tiny_model(SERVED[name]).save_pretrained(tmp_path)
    card, file = resolve_model(str(tmp_path)), make_weights_file()
    layout = card.layout(block_tokens=4, dtype="float32")

    def computed(weights: WeightsChoice, file: WeightsFile | None) -> bytes:
        arena, library = bytearray(layout.block_bytes * 20), NativeLibrary(library_path())
        computation = Computation(weights=weights, threads=1, file=file)
        engine = load_native_engine(card, layout, memoryview(arena), library, computation)
        return all_logprobs(engine, TOKENS, range(18), VOCAB).tobytes()

    assert computed(weights, file) == computed(weights, None)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-64] + bytes(64))
    assert computed(weights, file) != computed(weights, None), "the second worker read the model's file"
    other: WeightsChoice = "stored" if weights == "dense" else "dense"
    assert computed(other, file) == computed(other, None)
    os.close(file.descriptor)
