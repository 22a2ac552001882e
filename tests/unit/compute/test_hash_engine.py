"""The hash engine: its properties beyond the conformance suite."""

from __future__ import annotations

import random

import pytest

from baton.compute.hash_engine import EOS_TOKEN, hash_card
from baton.compute.load_engine import load_engine
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.step_engine import StepEngine
from baton.core.types import Sampling
from baton.decide.kv.layout import KVLayout
from tests.unit.compute.models import engine_of, generate, part_of, run

PROMPT = [3 + byte for byte in b"the quick brown fox"]


def test_every_byte_of_kv_matters() -> None:
    """One flipped bit anywhere in the context gives another digest, and so another text."""
    engine, arena = engine_of(hash_card(), block_tokens=4)
    run(engine, part_of(PROMPT, range(16)))
    expected = _decode(engine, 6)
    for at in range(0, len(PROMPT) // 4 * engine.layout.block_bytes, 7):
        arena[at] ^= 1
        assert _decode(engine, 6) != expected, at
        arena[at] ^= 1
    assert _decode(engine, 6) == expected


def _decode(engine: StepEngine, count: int) -> list[int]:
    """Decode after the prompt without computing it again."""
    tokens = [*PROMPT, 3]
    for _ in range(count):
        last = part_of(tokens, range(16), start=len(tokens) - 1, prompt_tokens=len(PROMPT))
        tokens.append(run(engine, last)[0].token or 0)
    return tokens


def test_the_text_does_not_depend_on_the_block_size() -> None:
    """So KV converted between two layouts must give the same text."""
    texts = {
        tuple(generate(engine_of(hash_card(), block_tokens=size)[0], PROMPT, range(60), 40)) for size in (1, 4, 16, 64)
    }
    assert len(texts) == 1


def test_more_layers_work_as_well() -> None:
    """Any layout of bytes works, for tests of layer-wise transfers."""
    layout = KVLayout(layers=3, kv_heads=2, head_dim=5, block_tokens=8, dtype="uint8")
    arena = bytearray(layout.block_bytes * 16 + 11)
    engine = load_engine(hash_card(), layout, memoryview(arena))
    assert len(generate(engine, PROMPT, range(16), 10)) == 10
    assert arena[-11:] == b"\0" * 11


@pytest.mark.parametrize(
    ("tensor", "pipeline", "context"), [(1, 1, 1), (2, 1, 1), (8, 1, 1), (8, 1, 2), (16, 3, 4), (1, 3, 1), (4, 2, 1)]
)
def test_the_text_does_not_depend_on_how_ranks_share_a_block(tensor: int, pipeline: int, context: int) -> None:
    """Every byte of every rank matters, including those of heads that two ranks hold, or of which they share tokens."""
    size = {"layers": 3, "kv_heads": 4, "head_dim": 2, "block_tokens": 4, "dtype": "uint8"}
    texts: list[list[int]] = []
    for ranks in ({}, {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context}):
        layout = KVLayout(**size, **ranks)
        arena = bytearray(layout.block_bytes * 16)
        engine = load_engine(hash_card(), layout, memoryview(arena))
        run(engine, part_of(PROMPT, range(16)))
        texts.append(_decode(engine, 6))
    assert texts[0] == texts[1]
    assert all(shard.size_bytes > 1 for shard in layout.shards)
    for at in range(0, len(PROMPT) // 4 * layout.block_bytes, 3):
        arena[at] ^= 1
        assert _decode(engine, 6) != texts[0], at
        arena[at] ^= 1


def test_texts_are_printable_and_end_now_and_then() -> None:
    """About one token in 64 ends the text, so lengths vary."""
    engine, _ = engine_of(hash_card(), blocks=256, block_tokens=16)
    tokens = generate(engine, PROMPT, range(256), 2000)
    tokenizer = load_tokenizer(hash_card())
    assert tokenizer.decode(tokens).isprintable()
    assert 10 < tokens.count(EOS_TOKEN) < 60


def test_a_greedy_text_ignores_the_seed() -> None:
    engine, _ = engine_of(hash_card())
    texts = [generate(engine, PROMPT, range(16), 9, Sampling(temperature=0.0, seed=seed)) for seed in range(3)]
    assert texts[0] == texts[1] == texts[2]


def test_bytes_are_tokens() -> None:
    """A prompt has as many tokens as bytes; special ones have no text."""
    tokenizer = load_tokenizer(hash_card())
    text = "".join(chr(random.Random(1).randrange(32, 0x3000)) for _ in range(50))
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode([0, 1, *tokenizer.encode(text), 2]) == text
    assert tokenizer.decode([0], skip_special=False) == "<eos>"
