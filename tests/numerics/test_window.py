"""Models with sliding windows equal transformers, without the KV behind the window."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers

from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.config import BatchLimits
from baton.core.messages import ReleaseBlocks, RequestFinished, StartPrefill, StartRequest, ToWorker
from baton.core.types import HostId, Request, RequestId, WorkerId, pack_tokens
from baton.decide.kv.hashing import block_hashes
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules, Window
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.little_cluster import BLOCK_TOKENS, new_batcher
from tests.unit.compute.models import GREEDY, TINY, VOCAB, engine_of, part_of, run, tiny_model

SEEN = 11
WINDOW = Window(tokens=SEEN, step_tokens=BLOCK_TOKENS)
PROMPT = [(7 * position * position + 3 * position + 5) % VOCAB for position in range(60)]
OUTPUT_TOKENS = 40
W = WorkerId("w")
Kind = Literal["torch", "native"]


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return tiny_model(transformers.MistralConfig(**TINY, sliding_window=SEEN))


@pytest.fixture(scope="module")
def folder(model: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    model.save_pretrained(path)
    return path


def huggingface_text(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """Generate greedily, with one pass over the whole text per token, so that no cache can drop KV."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(OUTPUT_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_window_of_a_model_is_that_of_its_widest_layer(folder: Path, tmp_path: Path) -> None:
    """If one layer has no window, the model has none."""
    assert resolve_model(str(folder)).window_tokens == SEEN
    mixed = transformers.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    tiny_model(mixed).save_pretrained(tmp_path)
    assert resolve_model(str(tmp_path)).window_tokens is None


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_noise_behind_the_window_does_not_change_the_text(
    kind: Kind, model: transformers.PreTrainedModel, folder: Path
) -> None:
    """Before every step, each block that the pool would release is filled with NaN, which spreads to any reader."""
    engine, arena = engine_of(resolve_model(str(folder)), kind=kind, block_tokens=BLOCK_TOKENS)
    block_bytes = engine.layout.block_bytes
    tokens, start = list(PROMPT), 0
    while len(tokens) < len(PROMPT) + OUTPUT_TOKENS:
        end = min(start + 9, len(tokens))
        behind_bytes = WINDOW.behind_tokens(start) // BLOCK_TOKENS * block_bytes
        arena[:behind_bytes] = b"\xff" * behind_bytes
        (result,) = run(engine, part_of(tokens, range(30), start=start, end=end, prompt_tokens=len(PROMPT)))
        start = end
        if result.token is not None:
            tokens.append(result.token)
    assert tokens[len(PROMPT) :] == huggingface_text(model, PROMPT)


def serve(engine: StepEngine, pool: HostPool, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Run requests on one worker over one pool until all are finished."""
    batcher = new_batcher(W, BatchLimits(step_tokens_max=16, requests_max=4), BLOCK_TOKENS)
    texts: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        request = Request(
            id=RequestId(name),
            prompt_tokens=len(prompt),
            block_hashes=block_hashes(prompt, block_tokens=BLOCK_TOKENS),
            output_tokens_max=OUTPUT_TOKENS,
            arrived_at_s=0.0,
            sampling=GREEDY,
        )
        pool.handle(StartPrefill(request, 1, W, "end"))
        batcher.apply([StartRequest(request, 1, pack_tokens(prompt), "end")])
    for _ in range(2000):
        if all(len(text) == OUTPUT_TOKENS for text in texts.values()):
            return texts
        step = batcher.plan(0.0)
        if step.slices:
            batcher.commit(step, engine.execute(step))
        report = batcher.take_report(now_s=0.0)
        for token in report.tokens if report is not None else ():
            texts[token.request_id].append(token.token)
        for event in report.events if report is not None else ():
            commands = pool.handle(event)
            if isinstance(event, RequestFinished):
                commands += pool.handle(ReleaseBlocks(event.request_id))
            batcher.apply([command.command for command in commands if isinstance(command, ToWorker)])
        pool.check()
    raise AssertionError(f"no end: {texts}")


def test_requests_longer_than_the_arena_give_their_text_alone(
    model: transformers.PreTrainedModel, folder: Path
) -> None:
    """Requests of 100 tokens each share 48 slots, because blocks behind a window are reused."""
    blocks = WINDOW.room_tokens(BLOCK_TOKENS) // BLOCK_TOKENS + 4
    engine, _ = engine_of(resolve_model(str(folder)), blocks=blocks, block_tokens=BLOCK_TOKENS)
    pool = HostPool(
        host=HostId("h"),
        blocks_total=blocks,
        block_tokens=BLOCK_TOKENS,
        eviction=LeastRecentlyUsed,
        prompts=PromptRules(window=WINDOW),
    )
    prompts = {"one": PROMPT, "other": PROMPT[::-1], "third": PROMPT[7:]}
    assert blocks * BLOCK_TOKENS < len(PROMPT)
    texts = serve(engine, pool, prompts)
    assert texts == {name: huggingface_text(model, prompt) for name, prompt in prompts.items()}


def test_a_prompt_with_a_dropped_beginning_continues_from_its_last_window(
    model: transformers.PreTrainedModel, folder: Path
) -> None:
    engine, _ = engine_of(resolve_model(str(folder)), blocks=16, block_tokens=BLOCK_TOKENS)
    pool = HostPool(
        host=HostId("h"),
        blocks_total=16,
        block_tokens=BLOCK_TOKENS,
        eviction=LeastRecentlyUsed,
        prompts=PromptRules(window=WINDOW),
    )
    first = serve(engine, pool, {"first": PROMPT})["first"]
    names = block_hashes(PROMPT + first, block_tokens=BLOCK_TOKENS)
    assert pool.held_tokens(names[:1]) == 0, "its first block is still there"
    assert pool.held_tokens(names) >= len(PROMPT), "its last window is not"
    turn = PROMPT + first + PROMPT[:3]
    assert serve(engine, pool, {"turn": turn})["turn"] == huggingface_text(model, turn)
