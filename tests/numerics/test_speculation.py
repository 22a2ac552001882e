"""Speculative decoding with the real model: a request with and without drafts, greedy, sampled, and with a grammar."""

from __future__ import annotations

import pytest

from baton.compute.load_engine import load_engine
from baton.compute.models.card import ModelCard
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.step_engine import StepEngine
from baton.core.config import BatchLimits, SpeculationConfig
from baton.core.messages import StartRequest
from baton.core.types import (
    BlockId,
    Grammar,
    HostId,
    Request,
    RequestId,
    Sampling,
    WorkerId,
    WorkerView,
    pack_tokens,
)
from baton.decide.control.batcher import Batcher
from baton.decide.cost.linear import LinearCost
from baton.decide.policy.batching import BatcherPolicies, MixedChunked
from baton.decide.policy.fairness import FirstComeFirstServed

OUTPUT_TOKENS, BLOCKS, BLOCK_TOKENS = 40, 16, 16
TEXT = "one two three four five six seven eight. one two three four five six seven eight. one two three"


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def engine(card: ModelCard) -> StepEngine:
    """The engine that a server on this machine would use, in float32."""
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype="float32")
    return load_engine(card, layout, memoryview(bytearray(layout.block_bytes * BLOCKS)), dtype="float32", threads=1)


def _run(engine: StepEngine, prompt: list[int], sampling: Sampling, tokens_max: int) -> tuple[list[int], int]:
    """Return the text, and the number of accepted drafts."""
    rules = BatcherPolicies(
        batching=MixedChunked(),
        fairness=FirstComeFirstServed(),
        cost=LinearCost(),
        speculation=SpeculationConfig(tokens_max=tokens_max),
    )
    view = WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed")
    batcher = Batcher(view, block_tokens=BLOCK_TOKENS, limits=BatchLimits(), policies=rules)
    request = Request(
        id=RequestId(f"r{tokens_max}"),
        prompt_tokens=len(prompt),
        output_tokens_max=OUTPUT_TOKENS,
        arrived_at_s=0.0,
        sampling=sampling,
    )
    blocks = tuple(BlockId(block) for block in range(BLOCKS))
    batcher.apply([StartRequest(request, 1, pack_tokens(prompt), "end", blocks)])
    text: list[int] = []
    accepted = 0
    while (step := batcher.plan(0.0)).slices:
        batcher.commit(step, engine.execute(step))
        report = batcher.take_report(now_s=0.0, step_s=1.0)
        assert report is not None
        text += [token.token for token in report.tokens]
        accepted += report.accepted_tokens
    return text, accepted


@pytest.mark.parametrize(
    ("sampling", "comes_true"),
    [
        (Sampling(temperature=0.0), True),
        (Sampling(temperature=0.8, seed=3, top_p=0.9, frequency_penalty=0.3), False),
        (Sampling(temperature=0.7, seed=5, grammar=Grammar(kind="regex", text="( one two three four)+")), True),
    ],
    ids=["greedy", "drawn", "grammar"],
)
def test_the_text_does_not_change(engine: StepEngine, card: ModelCard, sampling: Sampling, comes_true: bool) -> None:
    prompt = load_tokenizer(card).encode(TEXT)
    plain, none = _run(engine, prompt, sampling, 0)
    guessed, accepted = _run(engine, prompt, sampling, 5)
    assert guessed == plain
    assert none == 0
    assert accepted > 3 or not comes_true
