"""Every CPU engine gives the same tokens whether KV is in the arena or in the spill space (INV-8)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from baton.compute.hash_engine import hash_card
from baton.compute.load_engine import EngineChoice, choose_engine, load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.config import BatchLimits
from baton.core.errors import ArenaError, ModelError
from baton.core.messages import BlocksGranted, StartPrefill, StartRequest, StepReport, ToWorker
from baton.core.spill import SPILLED_FROM, SpillBlocks
from baton.core.types import HostId, Request, RequestId, Sampling, WorkerId, WorkerView, pack_tokens
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVDtype, KVLayout
from baton.decide.kv.spill import SpillRules
from baton.decide.kv.window import PromptRules
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.decide.policy.fairness import FirstComeFirstServed
from baton.move.arena.spill import SpillMemory, create_spill
from tests.unit.compute.models import VOCAB, part_of, run, tiny_llama

ARENA_BLOCKS, SLOTS, BLOCK_TOKENS = 6, 40, 4
PROMPT = [(7 * index * index + 3 * index) % (VOCAB - 3) + 3 for index in range(4 * ARENA_BLOCKS * BLOCK_TOKENS)]
OUTPUT_TOKENS = 20
WORKER = WorkerId("w")
Kind = Literal["hash", "native", "torch"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder: Path = tmp_path_factory.mktemp("llama")
    tiny_llama().save_pretrained(folder)
    return resolve_model(str(folder))


class OneWorker:
    """A pool, a batcher and an engine that serve one request, without processes between them."""

    def __init__(self, kind: Kind, card: ModelCard, kv_dtype: KVDtype, blocks: int, slots: int, folder: str) -> None:
        self.layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=kv_dtype)
        self.arena = memoryview(bytearray(b"\xff" * self.layout.block_bytes * blocks))  # NaN everywhere
        self.spill = _spill_memory(self.layout, slots, folder) if slots else None
        self.engine = _engine(kind, card, self.layout, self.arena, self.spill)
        rules = SpillRules(blocks=slots, token_read_s=0.0, tokens_max=10_000) if slots else None
        self.pool = HostPool(
            host=HostId("h"),
            blocks_total=blocks,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            prompts=PromptRules(spill=rules),
        )
        self.batcher = Batcher(
            WorkerView(id=WORKER, host=HostId("h"), role="mixed"),
            block_tokens=BLOCK_TOKENS,
            limits=BatchLimits(step_tokens_max=64, growth_tokens=4),
            policies=BatcherPolicies(batching=MixedChunked(), fairness=FirstComeFirstServed(), cost=LinearCost()),
        )
        self.spilled_tokens = 0
        """The most spilled tokens of a step."""

    def serve(self, prompt: Sequence[int]) -> list[int]:
        """Return the greedy output for a prompt."""
        request = Request(
            id=RequestId("r"),
            prompt_tokens=len(prompt),
            output_tokens_max=OUTPUT_TOKENS,
            arrived_at_s=0.0,
            sampling=Sampling(temperature=0.0),
        )
        self.pool.handle(StartPrefill(request, 1, WORKER, "end"))
        self.batcher.apply([StartRequest(request, 1, pack_tokens(array("I", prompt)), "end")])
        output: list[int] = []
        while not self.batcher.is_idle:
            if self.spill is not None:
                for order in self.batcher.spills:
                    self.spill.write(self.arena, order.blocks, order.slots)
                self.batcher.spills.clear()
            step = self.batcher.plan(0.0)
            output += self._pass_on(self.batcher.take_report(now_s=0.0))
            if step.slices:
                self.spilled_tokens = max(self.spilled_tokens, step.shape.spilled_tokens)
                self.batcher.commit(step, self.engine.execute(step))
                output += self._pass_on(self.batcher.take_report(now_s=0.0, step_s=1.0))
        return output

    def _pass_on(self, report: StepReport | None) -> list[int]:
        """Give the pool a report and the batcher the answers. Return the report's tokens."""
        if report is None:
            return []
        for event in report.events:
            for told in self.pool.handle(event):
                if isinstance(told, ToWorker):
                    assert isinstance(told.command, BlocksGranted | SpillBlocks)
                    self.batcher.apply([told.command])
            self.pool.check()
        return [token.token for token in report.tokens]


def _spill_memory(layout: KVLayout, slots: int, folder: str) -> SpillMemory:
    return SpillMemory(create_spill(folder, slots * layout.block_bytes), layout, slots)


def _engine(kind: Kind, card: ModelCard, layout: KVLayout, arena: memoryview, spill: SpillMemory | None) -> StepEngine:
    choice = EngineChoice(kind="torch") if kind == "torch" else choose_engine(card, layout)
    assert choice.kind == kind, choice.reason
    choice = replace(choice, spill=spill.memory if spill is not None else None)
    return load_engine(card, layout, arena, threads=1, choice=choice)


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "is_file"),
    [
        ("hash", "uint8", True),
        ("native", "float32", True),
        ("native", "bfloat16", False),
        ("native", "int8", True),
        ("torch", "float32", False),
        ("torch", "bfloat16", True),
    ],
)
def test_a_prompt_of_four_arenas_gives_the_tokens_of_a_large_arena(
    kind: Kind, kv_dtype: KVDtype, is_file: bool, llama: ModelCard, tmp_path: Path
) -> None:
    card = hash_card() if kind == "hash" else llama
    folder = str(tmp_path) if is_file else ""
    large = OneWorker(kind, card, kv_dtype, 64, 0, "")
    small = OneWorker(kind, card, kv_dtype, ARENA_BLOCKS, SLOTS, folder)
    assert small.serve(PROMPT) == large.serve(PROMPT)
    assert small.spilled_tokens > 3 * ARENA_BLOCKS * BLOCK_TOKENS
    assert large.spilled_tokens == 0


def test_the_native_engine_refuses_slots_that_do_not_exist_or_that_a_token_is_written_to(llama: ModelCard) -> None:
    worker = OneWorker("native", llama, "float32", ARENA_BLOCKS, SLOTS, "")
    tokens = PROMPT[: 2 * BLOCK_TOKENS + 1]
    for slot in (-1, SLOTS):
        with pytest.raises(ModelError, match="is outside of an arena of 6"):
            run(worker.engine, part_of(tokens, [SPILLED_FROM + slot, 0, 1], start=2 * BLOCK_TOKENS))
    with pytest.raises(ModelError, match="is outside of an arena of 6"):
        run(worker.engine, part_of(tokens, [SPILLED_FROM, SPILLED_FROM + 1, 1], start=2 * BLOCK_TOKENS - 1))


def test_an_impossible_spill_space_is_refused(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(ArenaError, match=r"kv\.spill\.folder .* cannot be used"):
        create_spill(str(occupied), 4096)
    with pytest.raises(ArenaError, match=r"kv\.spill needs .* lower kv\.spill\.bytes"):
        create_spill(str(tmp_path), 2**60)
