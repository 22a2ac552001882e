"""The embedded model with real weights and its tokenizer give the same tokens as transformers in float32."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from baton.compute.models.card import ModelCard
from baton.compute.models.chat_template import ChatInput
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import Tokenizer, load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.compute.step_engine import StepEngine
from baton.core.config import SandboxConfig
from tests.numerics import smollm2_reference
from tests.numerics.prompts import PROMPTS, Prompt
from tests.unit.compute.models import engine_of, part_of, run

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\n\n\nand lines \r\n end ",
    "1234567890 3.14159 1,000,000 2026-11-21",
    "I'll say it's theirs; they've DON'T y'all",
    "日本語のテキストと中文文本，以及한국어",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 é e\u0301 ﬁ ½ ①",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> <|not_special|> <|im_start|",
    "\u200b\ufeff\u00a0\u2028 zero width",
    'https://example.org/?q=a%20b&c=d#e {"json": [1, 2.5e-3, null]}',
    "A" * 500,
    "\x00\x01\x7f control",
]

OUTPUT_TOKENS = 12
COMPARED = [prompt for prompt in PROMPTS if len(prompt.text) < 400][::8]
"""An eighth of the short prompts. The tests through the server compare all of them, and the long ones."""
BLOCK_TOKENS = 16
CHUNK_TOKENS = 24


@pytest.fixture(scope="module")
def engine() -> StepEngine:
    blocks = sum(-(-len(tokens) // BLOCK_TOKENS) + 2 for tokens in _tokens(load_tokenizer(_card()), COMPARED))
    return engine_of(_card(), blocks=blocks, block_tokens=BLOCK_TOKENS)[0]


@pytest.fixture(scope="module")
def reference_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """transformers ignores `pre` of the file, so single digits are split here, as in the published tokenizer."""
    tokenizer = smollm2_reference.load_tokenizer()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(_card())


@pytest.mark.deep
def test_greedy_tokens_equal_those_of_transformers(
    engine: StepEngine, tokenizer: Tokenizer, reference: transformers.PreTrainedModel
) -> None:
    """All prompts are decoded in one batch. transformers reads each text once, and must predict each token of it.

    To load transformers' model takes longer than all other tests here. Its stored texts are compared in every run:
    `test_through_http`.
    """
    prompts = _tokens(tokenizer, COMPARED)
    texts = _generate(engine, prompts)
    for prompt, tokens, text in zip(COMPARED, prompts, texts, strict=True):
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([text[:-1]])).last_hidden_state[0, len(tokens) - 1 :]
            expected = reference.lm_head(hidden).argmax(-1).tolist()
        assert text[len(tokens) :] == expected, prompt.name


def test_chats_render_as_transformers_renders_them(
    reference_tokenizer: transformers.PreTrainedTokenizerBase,
) -> None:
    """With the template of the GGUF file, in the sandbox."""
    template = load_chat_template(_card(), SandboxConfig())
    for prompt in PROMPTS:
        if prompt.messages:
            expected = reference_tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=False, add_generation_prompt=True
            )
            assert template.render(ChatInput(prompt.messages)) == expected == prompt.text


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_those_of_transformers(
    text: str, tokenizer: Tokenizer, reference_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    """The vocabulary from GGUF metadata encodes and decodes like the original."""
    tokens = tokenizer.encode(text)
    assert tokens == reference_tokenizer.encode(text)
    for skip in (True, False):
        theirs = reference_tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(tokens, skip_special=skip) == theirs


@settings(max_examples=settings().max_examples * 2)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_equals_transformers(
    tokenizer: Tokenizer, reference_tokenizer: transformers.PreTrainedTokenizerBase, text: str
) -> None:
    tokens = tokenizer.encode(text)
    assert tokens == reference_tokenizer.encode(text)
    theirs = reference_tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(tokens, skip_special=False) == theirs


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
