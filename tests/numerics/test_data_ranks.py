"""A mixture of experts whose ranks compute requests of their own computes what one rank computes.

Tolerance: as in test_ranks.py, because ranks batch other tokens together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.place import data_problems, expert_problems
from baton.compute.ranks.runner import divide_requests
from baton.compute.torch.kernels.paged_kv import Row
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.numerics.test_ranks import TOLERANCE
from tests.unit.compute.models import (
    VOCAB,
    all_logprobs,
    engine_of,
    generate,
    part_of,
    poison,
    run,
    tiny_model,
)
from tests.unit.compute.rank_threads import parallel_engine

CASES = {
    "biases": (CONFIGS["qwen3moe_normalized_every_second"], {"data": 2}),
    "shared_and_dense_in_two_stages": (
        CONFIGS["qwen2moe_normalized_some_dense_unbiased"],
        {"data": 2, "pipeline": 2},
    ),
    "latent": (CONFIGS["deepseek3"], {"data": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_with_requests_of_their_own_give_the_log_probabilities_of_one_rank(name: str, tmp_path: Path) -> None:
    """One request leaves the other ranks without a token. In a batch, requests move between ranks from step to step."""
    config, ranks = CASES[name]
    tiny_model(config).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    prompts = [TOKENS[:1], TOKENS[3:43], TOKENS[5:16]]
    tables = [range(12 * index + 20, 12 * index + 32) for index in range(len(prompts))]
    alone, whole = engine_of(card, kind="torch")
    expected = all_logprobs(alone, TOKENS, range(18), VOCAB)
    texts = [generate(alone, prompt, table, 6) for prompt, table in zip(prompts, tables, strict=True)]
    with parallel_engine(card, **ranks, experts=True) as (engine, arena, layout):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)
        written, ours = ([[*prompt] for prompt in prompts], [0] * len(prompts))
        for _ in range(6):
            parts = [
                part_of(text, table, start=start, prompt_tokens=len(prompt))
                for text, table, start, prompt in zip(written, tables, ours, prompts, strict=True)
            ]
            ours = [len(text) for text in written]
            for text, result in zip(written, run(engine, *parts), strict=True):
                text.append(result.token or 0)
        assert [text[len(prompt) :] for text, prompt in zip(written, prompts, strict=True)] == texts
        if layout.pipeline_parallel == 1:  # blocks are those of one rank
            held = slice(0, 17 * layout.block_bytes // 4)
            kv = [np.frombuffer(each, np.float32)[held] for each in (arena, whole)]
            np.testing.assert_allclose(*kv, atol=TOLERANCE, rtol=0)


def test_requests_are_divided_by_tokens_then_by_context() -> None:
    rows = [Row(0, 1, 9, torch.arange(3)), Row(1, 8, 0, torch.arange(2)), Row(9, 1, 99, torch.arange(25))]
    rows += [Row(10, 1, 50, torch.arange(13)), Row(11, 1, 40, torch.arange(11))]
    assert [[row.first for row in part] for part in divide_requests(rows, 2)] == [[1], [9, 10, 11, 0]]
    assert [[row.first for row in part] for part in divide_requests(rows[2:], 2)] == [[9], [10, 11]]
    assert divide_requests(rows[:1], 3) == [rows[:1], [], []]


def test_ranks_that_cannot_have_requests_of_their_own_are_refused(tmp_path: Path) -> None:
    tiny_model(CONFIGS["qwen2moe"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype="float32", data_parallel=3)
    assert expert_problems(card, layout) == [
        "8 experts cannot be shared by 3 ranks: use --tp or --dp with a divisor of 8, or leave out "
        "--enable-expert-parallel"
    ]
    assert data_problems(layout, "cpu", experts=True) == []
    both = card.layout(block_tokens=4, dtype="float32", data_parallel=2, tensor_parallel=2)
    plain, divided, gpu = data_problems(both, "cuda:0", experts=False)
    assert "add --enable-expert-parallel, or start 2 workers instead, by --mixed 2" in plain
    assert divided == "--dp 2 gives each rank the whole attention, and --tp 2 divides it: leave out one"
    assert gpu.endswith("each GPU has its own: use --tp 2 --enable-expert-parallel, or --device cpu")
    assert data_problems(card.layout(block_tokens=4, dtype="float32"), "cuda:0", experts=False) == []
