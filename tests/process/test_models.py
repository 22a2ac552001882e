"""Latents and experts through the real server: what one process prefills and another decodes is one text (INV-8)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from tests.numerics.test_architectures import CONFIGS
from tests.serving import RunningServer, serving
from tests.unit.compute.models import tiny_model

VOCAB = 259
PROMPTS = ("a", "The tide is", "one two three four five six seven eight nine ten eleven twelve", "x" * 70)
OUTPUT_TOKENS = 24


def save_with_bytes(config: transformers.PretrainedConfig, folder: Path) -> transformers.PreTrainedModel:
    """Write a random model with a tokenizer of bytes."""
    model = tiny_model(type(config)(**config.to_dict() | {"vocab_size": VOCAB}))
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: index + 3 for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def _expected(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(OUTPUT_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _answers(server: RunningServer) -> list[tuple[list[int], str]]:
    """Ask each prompt twice: the second time its blocks come from the cache."""
    found: list[tuple[list[int], str]] = []
    with server.client() as client:
        for _ in range(2):
            for prompt in PROMPTS:
                ids = client.post("/tokenize", json={"prompt": prompt}).raise_for_status().json()["tokens"]
                body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body).raise_for_status().json()
                found.append((ids, answer["choices"][0]["text"]))
    return found


@pytest.mark.parametrize("name", ["deepseek3", "qwen2moe"])
def test_the_text_is_transformers_text_whoever_decodes(name: str, tmp_path: Path) -> None:
    """Experts, and of DeepSeek one latent vector per token in the arena's blocks; the vector of a prompt as well."""
    model = save_with_bytes(CONFIGS[name], tmp_path)
    with serving(str(tmp_path), "--dtype", "float32", "--threads", "1", "--block-tokens", "8") as server:
        apart = _answers(server)
        assert server.metric("baton_prefix_hit_tokens_total") > 0
        assert server.metric("baton_handoff_seconds_count") >= len(apart)
        assert server.metric("baton_handoff_bytes_total") == 0
        assert "native engine" in server.output()
        with server.client() as client:
            vector = client.post("/v1/embeddings", json={"input": PROMPTS[2]}).raise_for_status().json()["data"][0]
            decode = client.post("/detokenize", json={"tokens": _expected(model, apart[2][0])}).json()["prompt"]
    with serving(str(tmp_path), "--dtype", "float32", "--mixed", "1", "--threads", "1") as server:
        assert _answers(server) == apart
    assert apart[2][1] == decode
    with torch.inference_mode():
        hidden = model.model(torch.tensor([apart[2][0]])).last_hidden_state[0, -1]
    np.testing.assert_allclose(vector["embedding"], (hidden / hidden.norm()).numpy(), atol=2e-5, rtol=0)
