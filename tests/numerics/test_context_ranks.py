"""Ranks that share the tokens of their KV heads compute what one rank computes.

Tolerance: as in test_ranks.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.context_attention import merged, partial_attention, plain_partial_attention
from baton.compute.ranks.load_rank import RankArena
from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import KVLayout
from baton.move.transport.convert import convert
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.numerics.test_expert_ranks import SENT
from tests.numerics.test_ranks import TOLERANCE
from tests.unit.compute.models import (
    TINY,
    VOCAB,
    all_logprobs,
    engine_of,
    generate,
    part_of,
    poison,
    run,
    tiny_model,
)
from tests.unit.compute.rank_threads import engine_over, parallel_engine

ONE_HEAD = CONFIGS["llama_one_kv_head"]
EIGHT_QUERIES = TINY | {"num_attention_heads": 8, "num_key_value_heads": 2}
CASES = {
    "two_ranks": (ONE_HEAD, {"tensor": 2, "context": 2}),
    "four_ranks_two_stages": (ONE_HEAD, {"tensor": 4, "context": 4, "pipeline": 2}),
    "each_token_twice": (ONE_HEAD, {"tensor": 4, "context": 2}),
    "two_heads": (CONFIGS["qwen2"], {"tensor": 4, "context": 2}),
    "two_heads_each_token_twice": (transformers.LlamaConfig(**EIGHT_QUERIES), {"tensor": 8, "context": 2}),
    "window": (CONFIGS["mistral_window"], {"tensor": 4, "context": 2}),
    "window_in_upper_layers": (CONFIGS["qwen2_window_in_upper_layers"], {"tensor": 4, "context": 2}),
    "latent": (CONFIGS["deepseek2_lite"], {"tensor": 4, "context": 4}),
    "latent_experts": (CONFIGS["deepseek3"], {"tensor": 2, "context": 2, "experts": True}),
    "sent_experts": (SENT, {"tensor": 4, "context": 2, "experts": True}),
    "micro_batches": (CONFIGS["mistral_window"], {"tensor": 4, "context": 2, "overlap": 2}),
}


DEEP = {"two_heads", "two_heads_each_token_twice", "window", "latent_experts", "sent_experts", "four_ranks_two_stages"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep) if name in DEEP else name for name in CASES]
)
def test_ranks_that_share_tokens_give_the_log_probabilities_of_one_rank(name: str, tmp_path: Path) -> None:
    """A prompt, and decode steps, of which some ranks hold no token at first."""
    config, ranks = CASES[name]
    tiny_model(config).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    expected, text = all_logprobs(alone, TOKENS, range(18), VOCAB), generate(alone, TOKENS[:1], range(16), 40)
    with parallel_engine(card, **ranks) as (engine, arena, layout):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)
        assert generate(engine, TOKENS[:1], range(20, 36), 40) == text
        holders = layout.tensor_parallel // layout.context_parallel
        assert layout.block_bytes == alone.layout.block_bytes * max(1, holders // layout.kv_heads)


ONE_HEAD_WINDOW = transformers.MistralConfig(**TINY | {"num_key_value_heads": 1}, sliding_window=11)


@pytest.mark.parametrize(
    "config", [ONE_HEAD, ONE_HEAD_WINDOW, CONFIGS["deepseek2_lite"]], ids=["full", "window", "latent"]
)
def test_a_ragged_batch_gives_the_text_of_one_rank(config: transformers.PretrainedConfig, tmp_path: Path) -> None:
    """Requests of 1 to 57 tokens decode beside chunks that begin within a block; the rest of the arena is NaN."""
    tiny_model(config).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    prompts = [TOKENS[:1], TOKENS[3:7], TOKENS[5:62], TOKENS[2:40], TOKENS[9:19]]
    tables = [range(16 * index, 16 * index + 16) for index in range(len(prompts))]
    alone = engine_of(card, kind="torch", blocks=80)[0]
    expected = [generate(alone, prompt, table, 5) for prompt, table in zip(prompts, tables, strict=True)]
    with parallel_engine(card, tensor=4, context=4, blocks=80) as (engine, arena, _):
        poison(arena)
        starts = [0, 3, 40, 13, 0]
        for prompt, table, start in zip(prompts, tables, starts, strict=True):
            if start:
                run(engine, part_of(prompt, table, end=start, sample=False))
        texts = [[*prompt] for prompt in prompts]
        for _ in range(5):
            parts = [
                part_of(text, table, start=start, prompt_tokens=len(prompt))
                for text, table, start, prompt in zip(texts, tables, starts, prompts, strict=True)
            ]
            starts = [len(text) for text in texts]
            for text, result in zip(texts, run(engine, *parts), strict=True):
                text.append(result.token or 0)
    assert [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)] == expected


def test_two_ranks_hold_a_context_that_the_arena_of_one_cannot(tmp_path: Path) -> None:
    """Ranks with an arena each, of 10 blocks of 4 tokens, hold a prompt of 70 tokens: 20 blocks of half the size."""
    tiny_model(ONE_HEAD).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    arena_bytes = 10 * alone.layout.block_bytes
    assert len(TOKENS) > arena_bytes // alone.layout.token_bytes
    layout = card.layout(block_tokens=4, dtype="float32", tensor_parallel=2, context_parallel=2)
    blocks = arena_bytes // layout.shards[0].size_bytes
    assert blocks == 20
    memories = [memoryview(bytearray(b"\xff" * arena_bytes)) for _ in range(2)]
    with engine_over(card, layout, lambda place: RankArena.alone(memories[place.rank], layout, place)) as engine:
        assert generate(engine, TOKENS, range(blocks), 9) == generate(alone, TOKENS, range(20), 9)
    for memory in memories:
        held = np.isfinite(np.frombuffer(memory, np.float32).reshape(blocks, -1)).any(1)
        assert held[: len(TOKENS) // 4 + 1].all(), "every rank holds a part of every block"


def test_converted_kv_gives_the_same_text(tmp_path: Path) -> None:
    """From one rank with other blocks to four ranks that share tokens, and back."""
    tiny_model(ONE_HEAD).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone, whole = engine_of(card, kind="torch", block_tokens=6)
    expected = generate(alone, TOKENS[:43], range(16), 9)
    ours, theirs = [BlockId(block) for block in range(13, 29)], [BlockId(block) for block in range(60, 40, -1)]
    with parallel_engine(card, tensor=4, context=4) as (ranks, arena, layout):
        first = run(alone, part_of(TOKENS[:43], ours))[0].token or 0
        poison(arena)
        _bring(alone.layout, layout, (ours, theirs), (whole, arena))
        assert [first, *_continue(ranks, theirs, first)] == expected
        poison(whole)
        _bring(layout, alone.layout, (theirs, ours), (arena, whole))
        assert [first, *_continue(alone, ours, first)] == expected


def _bring(source: KVLayout, target: KVLayout, tables, arenas) -> None:
    plan = Conversion(source, target).plan(*tables, range(43))
    convert(plan, *(memoryview(arena) for arena in arenas))


def _continue(engine, table, first: int) -> list[int]:
    tokens = [*TOKENS[:43], first]
    for _ in range(8):
        tokens.append(run(engine, part_of(tokens, table, start=len(tokens) - 1, prompt_tokens=43))[0].token or 0)
    return tokens[44:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_context_merge_to_its_attention(dtype: torch.dtype) -> None:
    """By the fused kernel and by products, which a GPU uses; the second of three ranks sees nothing."""
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(2, 3, count, 16, generator=random, dtype=torch.float64) for count in (5, 12, 12)
    )
    expected = (queries @ keys.mT / 4).softmax(-1) @ values
    for attention in (partial_attention, plain_partial_attention):
        parts: list[torch.Tensor] = []
        for own in (slice(0, 5), slice(0, 5), slice(5, 12)):
            found, sums = attention(*(each.to(dtype) for each in (queries, keys[:, :, own], values[:, :, own])), None)
            if len(parts) == 1:
                found, sums = torch.zeros_like(found), torch.full_like(sums, float("-inf"))
            parts.append(torch.cat((found, sums[..., None].view(dtype)), -1))
        result = merged(torch.stack(parts), 16)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
