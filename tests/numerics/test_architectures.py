"""Every architecture and option that is served, against transformers: small random models, all log probabilities.

Tolerance: 2e-4 absolute on log probabilities in float32. The orders of sums differ, nothing else does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from tests.unit.compute.models import (
    TINY,
    VOCAB,
    all_logprobs,
    engine_of,
    huggingface_logprobs,
    part_of,
    run,
    tiny_model,
)

TOLERANCE = 2e-4
TOKENS = [(7 * position * position + 3 * position + 5) % VOCAB for position in range(70)]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 32.0, "beta_slow": 1.0}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama_untied": transformers.LlamaConfig(**TINY),
    "llama_tied": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama_wide_heads": transformers.LlamaConfig(**TINY, head_dim=24),
    "llama_one_kv_head": transformers.LlamaConfig(**TINY | {"num_key_value_heads": 1}),
    "llama_no_grouping": transformers.LlamaConfig(**TINY | {"num_key_value_heads": 4}),
    "llama_biases": transformers.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama3_rope": transformers.LlamaConfig(
        **TINY, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 5e3}
    ),
    "linear_rope": transformers.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "yarn_rope": transformers.LlamaConfig(**TINY, rope_parameters=YARN),
    "yarn_rope_tempered": transformers.LlamaConfig(
        **TINY, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16.0, "truncate": False}
    ),
    "dynamic_rope_within_its_context": transformers.LlamaConfig(
        **TINY, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "mistral_full": transformers.MistralConfig(**TINY, sliding_window=None),
    "mistral_window": transformers.MistralConfig(**TINY, sliding_window=11),
    "qwen2": transformers.Qwen2Config(**TINY),
    "qwen2_window_in_upper_layers": transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=16),
    "mixtral": transformers.MixtralConfig(**TINY, **EXPERTS),
    "mixtral_window": transformers.MixtralConfig(**TINY, **EXPERTS | {"num_local_experts": 7}, sliding_window=11),
    "qwen2moe": transformers.Qwen2MoeConfig(**TINY, **QWEN_EXPERTS, shared_expert_intermediate_size=40),
    "qwen2moe_normalized_some_dense_unbiased": transformers.Qwen2MoeConfig(
        **TINY,
        **QWEN_EXPERTS | {"num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1]},
        shared_expert_intermediate_size=20,
        qkv_bias=False,
    ),
    "qwen2moe_every_expert": transformers.Qwen2MoeConfig(
        **TINY, **QWEN_EXPERTS | {"num_experts_per_tok": 8}, shared_expert_intermediate_size=40
    ),
    "qwen3moe": transformers.Qwen3MoeConfig(**TINY, **QWEN_EXPERTS, head_dim=16),
    "qwen3moe_normalized_every_second": transformers.Qwen3MoeConfig(
        **TINY, **QWEN_EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2}, head_dim=10, attention_bias=True
    ),
    "deepseek2_lite": transformers.DeepseekV2Config(**LATENT, q_lora_rank=None),
    "deepseek2_groups": transformers.DeepseekV2Config(
        **LATENT | {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2},
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
    ),
    "deepseek2_yarn": transformers.DeepseekV2Config(**LATENT, rope_parameters=DEEPSEEK_YARN),
    "deepseek3": transformers.DeepseekV3Config(
        **LATENT | {"n_routed_experts": 12, "num_experts_per_tok": 4}, q_lora_rank=20, n_group=3, topk_group=2
    ),
    "deepseek3_yarn_biased_unnormalized": transformers.DeepseekV3Config(
        **LATENT,
        q_lora_rank=20,
        n_group=1,
        topk_group=1,
        rope_parameters=DEEPSEEK_YARN,
        attention_bias=True,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "deepseek2_biased_without_bottleneck": transformers.DeepseekV2Config(
        **LATENT, q_lora_rank=None, attention_bias=True, tie_word_embeddings=True
    ),
    "deepseek3_every_expert": transformers.DeepseekV3Config(
        **LATENT | {"num_experts_per_tok": 4, "n_shared_experts": 2}, q_lora_rank=20, n_group=1, topk_group=1
    ),
    "qwen3_biased_tied": transformers.Qwen3Config(**TINY, head_dim=10, attention_bias=True, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """At every position of a prompt, for the whole vocabulary."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    engine, _ = engine_of(resolve_model(str(tmp_path)), kind="torch")
    mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
    np.testing.assert_allclose(mine, huggingface_logprobs(model, TOKENS), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        "mistral_window",
        "qwen2_window_in_upper_layers",
        "llama_tied",
        "qwen2moe",
        "deepseek3_yarn_biased_unnormalized",
        "deepseek2_groups",
    ],
)
def test_decoding_in_chunks_equals_the_whole_pass(name: str, tmp_path: Path) -> None:
    """Token by token after chunks of odd sizes, past the window, with a longer and a shorter request in the batch."""
    model = tiny_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    engine, _ = engine_of(resolve_model(str(tmp_path)), kind="torch")
    expected = huggingface_logprobs(model, TOKENS).argmax(-1)
    others = [TOKENS[:25], TOKENS[:64]]
    for index, other in enumerate(others):
        run(engine, part_of(other[:-1], range(20 + 20 * index, 40 + 20 * index)))
    run(engine, part_of(TOKENS[:6], range(18)))
    run(engine, part_of(TOKENS[:23], range(18), start=6))
    for end in range(24, len(TOKENS)):
        beside = [
            part_of(other, range(20 + 20 * index, 40 + 20 * index), start=len(other) - 1)
            for index, other in enumerate(others)
        ]
        result = run(engine, beside[0], part_of(TOKENS[:end], range(18), start=end - 1), beside[1])
        assert [entry.token for entry in result] == [expected[24], expected[end - 1], expected[63]]


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Shards with an index give the same model as one file."""
    model = tiny_model(CONFIGS["llama_untied"])
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, _ = engine_of(resolve_model(str(tmp_path / "whole")))
    shards, _ = engine_of(resolve_model(str(tmp_path / "shards")))
    first, second = (all_logprobs(engine, TOKENS, range(18), VOCAB) for engine in (whole, shards))
    np.testing.assert_array_equal(first, second)


def test_the_old_spelling_of_rope_options_is_read(tmp_path: Path) -> None:
    """Most checkpoints on the hub have rope_theta and rope_scaling instead of rope_parameters."""
    tiny_model(CONFIGS["llama3_rope"]).save_pretrained(tmp_path)
    new = read_config(resolve_model(str(tmp_path)))
    path = tmp_path / "config.json"
    text = path.read_text()
    start = text.index('"rope_parameters"')
    end = text.index("}", start) + 1
    old = LLAMA3 | {"original_max_position_embeddings": 32}
    scaling = str(old).replace("'", '"')
    path.write_text(text[:start] + f'"rope_theta": 5000.0, "rope_scaling": {scaling}' + text[end:])
    assert read_config(resolve_model(str(tmp_path))) == new


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_kv_may_be_stored_in_half_precision(kv_dtype: str, tmp_path: Path) -> None:
    """KV is rounded when stored. Results are close to the exact model, and do not depend on chunks."""
    model = tiny_model(CONFIGS["llama_tied"])
    model.save_pretrained(tmp_path)
    engine, _ = engine_of(resolve_model(str(tmp_path)), kv_dtype=kv_dtype)
    mine = all_logprobs(engine, TOKENS, range(18), VOCAB)
    np.testing.assert_allclose(mine, huggingface_logprobs(model, TOKENS), atol=0.3, rtol=0)
    whole = run(engine, part_of(TOKENS, range(18)))[0].token
    run(engine, part_of(TOKENS, range(20, 38), end=37))
    assert run(engine, part_of(TOKENS, range(20, 38), start=37))[0].token == whole
