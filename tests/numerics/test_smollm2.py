"""The embedded model with real weights gives the same greedy tokens as transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import Tokenizer, load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.compute.step_engine import StepEngine
from baton.core.config import SandboxConfig
from tests.numerics.prompts import PROMPTS, Prompt
from tests.unit.compute.models import engine_of, part_of, run

OUTPUT_TOKENS = 12
COMPARED = [prompt for prompt in PROMPTS if len(prompt.text) < 400][::4]
"""A quarter of the short prompts. The tests through the server compare all of them, and the long ones."""
BLOCK_TOKENS = 16
CHUNK_TOKENS = 24


@pytest.fixture(scope="module")
def engine() -> StepEngine:
    blocks = sum(-(-len(tokens) // BLOCK_TOKENS) + 2 for tokens in _tokens(load_tokenizer(_card()), COMPARED))
    return engine_of(_card(), blocks=blocks, block_tokens=BLOCK_TOKENS)[0]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(_card())


def test_greedy_tokens_equal_those_of_transformers(
    engine: StepEngine, tokenizer: Tokenizer, reference: transformers.PreTrainedModel
) -> None:
    """All prompts are decoded in one batch. transformers reads each text once, and must predict each token of it."""
    prompts = _tokens(tokenizer, COMPARED)
    texts = _generate(engine, prompts)
    for prompt, tokens, text in zip(COMPARED, prompts, texts, strict=True):
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([text[:-1]])).last_hidden_state[0, len(tokens) - 1 :]
            expected = reference.lm_head(hidden).argmax(-1).tolist()
        assert text[len(tokens) :] == expected, prompt.name


def test_chats_render_as_transformers_renders_them(tokenizer: Tokenizer) -> None:
    """With the template of the GGUF file, in the sandbox."""
    path = Path(_card().path)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    template = load_chat_template(_card(), SandboxConfig())
    for prompt in PROMPTS:
        if prompt.messages:
            expected = theirs.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
            assert template.render(prompt.messages) == expected == prompt.text


def test_there_is_a_prompt_of_every_length() -> None:
    lengths = [len(tokens) for tokens in _tokens(load_tokenizer(_card()), PROMPTS)]
    assert len(PROMPTS) >= 24
    assert min(lengths) == 1
    assert 3800 <= max(lengths) <= 4200


def _card() -> ModelCard:
    return resolve_model("smollm2-135m")


def _tokens(tokenizer: Tokenizer, prompts: tuple[Prompt, ...] | list[Prompt]) -> list[list[int]]:
    return [tokenizer.encode(prompt.text) for prompt in prompts]


def _generate(engine: StepEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Prefill in chunks, one prompt after the other, then decode all of them together."""
    tables, texts, block = [], [], 0
    for tokens in prompts:
        count = -(-(len(tokens) + OUTPUT_TOKENS) // BLOCK_TOKENS)
        tables.append(range(block, block + count))
        block += count
        for start in range(0, len(tokens), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(tokens))
            result = run(engine, part_of(tokens, tables[-1], start=start, end=end))[0]
        texts.append([*tokens, result.token])
    for _ in range(OUTPUT_TOKENS - 1):
        parts = [part_of(text, table, start=len(text) - 1) for text, table in zip(texts, tables, strict=True)]
        for text, result in zip(texts, run(engine, *parts), strict=True):
            text.append(result.token)
    return texts
