"""Ranks that run a step as two micro-batches compute what one rank computes, and exchange one under the other.

Tolerance: as in test_ranks.py. The order of exchange is compared over gloo, on every rank.
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

from baton.compute.models.resolve import resolve_model
from baton.compute.ranks.load_rank import CPU, RankArena, load_rank
from baton.compute.ranks.place import rank_place
from baton.compute.ranks.process_groups import GroupCollectives, connect_ranks
from baton.compute.ranks.runner import divide_rows
from baton.compute.torch.kernels.paged_kv import Row
from baton.compute.torch.layers.collectives import PendingSum
from tests.numerics.test_architectures import CONFIGS, TOKENS
from tests.numerics.test_expert_ranks import SENT
from tests.numerics.test_ranks import TOLERANCE
from tests.unit.compute.models import VOCAB, all_logprobs, engine_of, generate, part_of, poison, run, tiny_model
from tests.unit.compute.rank_threads import parallel_engine


@pytest.mark.parametrize(
    ("config", "tensor", "pipeline", "experts"),
    [
        (CONFIGS["mistral_window"], 2, 2, False),
        (CONFIGS["deepseek2_lite"], 2, 1, True),
        (SENT, 4, 1, True),
    ],
    ids=["window", "latent", "sent"],
)
def test_micro_batches_give_the_log_probabilities_of_one_rank(
    config: transformers.PretrainedConfig, tensor: int, pipeline: int, experts: bool, tmp_path: Path
) -> None:
    """A prompt is divided within itself: its second half reads the KV of the first. A lone decode is one batch."""
    tiny_model(config).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    alone = engine_of(card, kind="torch")[0]
    expected, text = all_logprobs(alone, TOKENS, range(18), VOCAB), generate(alone, TOKENS[:11], range(16), 6)
    ranks = {"tensor": tensor, "pipeline": pipeline, "experts": experts}
    with parallel_engine(card, **ranks, overlap=2) as (engine, arena, _):
        poison(arena)
        np.testing.assert_allclose(all_logprobs(engine, TOKENS, range(18), VOCAB), expected, atol=TOLERANCE, rtol=0)
        assert generate(engine, TOKENS[:11], range(20, 36), 6) == text
        other = [*TOKENS[30:43]]
        run(engine, part_of(other, range(40, 50)))
        decodes = part_of([*TOKENS[:11], text[0]], range(20, 36), start=11, prompt_tokens=11)
        both = run(engine, decodes, part_of([*other, 7], range(40, 50), start=13, prompt_tokens=13))
        assert both[0].token == text[1], "two requests that decode are a micro-batch each"


class _Recorded(GroupCollectives):
    """Records when sums begin, and when their results are waited for."""

    def __init__(self, ranks: GroupCollectives) -> None:
        super().__init__(ranks.place, ranks._stage, ranks._column, ranks._context)
        self.events: list[tuple[str, int]] = []

    def begin_sum(self, partial: Tensor) -> PendingSum:
        number = sum(event == "begin" for event, _ in self.events)
        self.events.append(("begin", number))
        return _RecordedSum(super().begin_sum(partial), number, self.events)


class _RecordedSum:
    def __init__(self, pending: PendingSum, number: int, events: list[tuple[str, int]]) -> None:
        self.pending, self.number, self.events = pending, number, events

    def wait(self) -> Tensor:
        self.events.append(("wait", self.number))
        return self.pending.wait()


def test_each_sum_runs_while_the_other_micro_batch_is_computed(tmp_path: Path) -> None:
    """Sum n is waited for after sum n + 1, of the other micro-batch, has begun. So computing it takes sum n's time."""
    tiny_model(CONFIGS["llama_tied"]).save_pretrained(tmp_path)
    card = resolve_model(str(tmp_path))
    layout = card.layout(block_tokens=4, dtype="float32", tensor_parallel=2)
    memory, store = memoryview(bytearray(8 * layout.block_bytes)), HashStore()
    rows = [Row(0, 9, 0, torch.arange(3)), Row(9, 1, 4, torch.arange(4, 6))]

    def compute(rank: int) -> list[tuple[str, int]]:
        ranks = _Recorded(connect_ranks(rank_place(layout, rank), store, CPU))
        own = load_rank(card, layout, RankArena.of(memory, layout, ranks.place), ranks, dtype="float32", threads=1)
        with torch.inference_mode():
            own.forward(TOKENS[:10], rows, own.kv, 5)
        return ranks.events

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compute, range(2))
    embedding, sums = [("begin", 0), ("wait", 0)], 2 * 2 * card.layers
    expected = [("begin", 1)]
    for number in range(1, sums):
        expected += [("begin", number + 1), ("wait", number)]
    assert first == second == [*embedding, *expected, ("wait", sums)]


def test_a_batch_is_divided_within_a_slice() -> None:
    """The first part has only the blocks of its tokens, whose last may be foreign to it."""
    rows = [Row(0, 1, 6, torch.arange(2)), Row(1, 7, 4, torch.arange(10, 13)), Row(8, 1, 0, torch.arange(20, 21))]
    first, second = divide_rows(rows, 4, 4)
    assert [(row.first, row.count, row.start, row.blocks.tolist()) for row in first] == [
        (0, 1, 6, [0, 1]),
        (1, 3, 4, [10, 11]),
    ]
    assert [(row.first, row.count, row.start, row.blocks.tolist()) for row in second] == [
        (0, 4, 7, [10, 11, 12]),
        (4, 1, 0, [20]),
    ]
