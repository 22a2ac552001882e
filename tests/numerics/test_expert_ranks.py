"""A mixture of experts whose ranks hold whole experts computes what one rank computes.

Tolerance: as in test_ranks.py, because attention is summed over ranks. Where ranks send tokens, routed experts give
the bits of one rank.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed import HashStore

from baton.compute.models.model_config import Experts
from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.load_rank import CPU
from baton.compute.ranks.place import RankPlace, expert_problems
from baton.compute.ranks.process_groups import connect_ranks
from baton.compute.torch.kernels.linear import DenseLinear
from baton.compute.torch.layers.experts import SentExperts, SeparateExperts
from baton.compute.torch.layers.mlp import GatedMlp
from tests.numerics.test_architectures import CONFIGS, QWEN_EXPERTS, TOKENS
from tests.numerics.test_ranks import TOLERANCE
from tests.unit.compute.models import TINY, VOCAB, all_logprobs, engine_of, generate, poison, tiny_model
from tests.unit.compute.rank_threads import parallel_engine

SUMMED = {"mixtral": (2, 1), "qwen2moe_normalized_some_dense_unbiased": (2, 2), "deepseek3": (4, 1)}
"""Ranks that have every token, and sum their results."""


@pytest.mark.parametrize("name", SUMMED)
def test_ranks_with_whole_experts_give_the_log_probabilities_of_one_rank(name: str, tmp_path: Path) -> None:
    """Over softmax and sigmoid routers, shared experts, and layers without experts; a prompt and decode steps."""
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    expected, text = all_logprobs(alone, TOKENS, range(18), VOCAB), generate(alone, TOKENS[:11], range(16), 6)
    tensor, pipeline = SUMMED[name]
    with parallel_engine(card, tensor=tensor, pipeline=pipeline, experts=True) as (engine, arena, _):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)
        assert generate(engine, TOKENS[:11], range(20, 36), 6) == text


SENT = transformers.Qwen2MoeConfig(
    **TINY, **QWEN_EXPERTS | {"num_experts_per_tok": 1}, shared_expert_intermediate_size=40
)
"""Four ranks send its tokens, because a token has one expert."""


def test_tokens_that_are_sent_to_their_experts_give_the_text_of_one_rank(tmp_path: Path) -> None:
    """Prompts, and decode steps of fewer tokens than ranks."""
    tiny_model(SENT).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    expected, text = all_logprobs(alone, TOKENS, range(18), VOCAB), generate(alone, TOKENS[:11], range(16), 6)
    with parallel_engine(card, tensor=4, experts=True) as (engine, arena, _):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)
        assert generate(engine, TOKENS[:11], range(20, 36), 6) == text


@pytest.mark.parametrize("count", [1, 5, 41])
def test_the_results_of_sent_tokens_have_the_bits_of_one_rank(count: int) -> None:
    """1 token leaves three of the four ranks without one. Each expert computes the same matrix, in the same order."""
    random = torch.Generator().manual_seed(count)
    mlps = [
        GatedMlp(*(DenseLinear(torch.randn(size, generator=random)) for size in ((48, 32), (32, 24)))) for _ in range(8)
    ]
    hidden = torch.randn(count, 32, generator=random)
    chosen = torch.rand(count, 8, generator=random).argsort(-1)[:, :3]
    store = HashStore()

    def compute(rank: int) -> Tensor:
        place = RankPlace(rank=rank, tensor=4, pipeline=1, experts=True)
        mine, ranks = place.tokens(count), connect_ranks(place, store, CPU)
        bank = SentExperts(SeparateExperts(mlps[2 * rank : 2 * rank + 2]), 2, ranks)
        return bank(hidden[mine.start : mine.stop], chosen[mine.start : mine.stop])

    with ThreadPoolExecutor(4) as pool:
        results = torch.cat(list(pool.map(compute, range(4))))
    assert torch.equal(results, SeparateExperts(mlps)(hidden, chosen))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("llama_tied", 2, "has no experts: leave out --enable-expert-parallel"),
        ("mixtral", 1, "among ranks, and there is 1: add --tp N or --dp N"),
        ("deepseek3", 8, "12 experts cannot be shared by 8 ranks: use --tp or --dp with a divisor of 12"),
    ],
)
def test_experts_that_ranks_cannot_hold_are_refused(name: str, tensor: int, message: str, tmp_path: Path) -> None:
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    (problem,) = expert_problems(card, card.layout(block_tokens=4, dtype="float32", tensor_parallel=tensor))
    assert message in problem


@pytest.mark.parametrize(("ranks", "per_token", "sends"), [(2, 1, False), (4, 2, False), (8, 2, True), (8, 8, False)])
def test_tokens_are_sent_where_that_moves_fewer_rows_than_a_sum(ranks: int, per_token: int, sends: bool) -> None:
    experts = Experts(layers=(0,), count=8, per_token=per_token, intermediate=8, normalized=True)
    assert RankPlace(rank=0, tensor=ranks, pipeline=1, experts=True).sends_tokens(experts) is sends
    assert not RankPlace(rank=0, tensor=ranks, pipeline=1).sends_tokens(experts)
