"""Baton's engine in one process, like a worker with all cores. The measured step includes sampling in Python."""

from __future__ import annotations

import random
import time

from protocol import Job, draw, serve

from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.resolve import resolve_model
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling

BLOCK_TOKENS = 16
WEIGHTS = {"int8": "int8", "int4": "stored"}


class BatonPeer:
    def __init__(self, job: Job) -> None:
        card = resolve_model(job.model)
        dtype = "float32" if job.weights == "float32" else "bfloat16"
        layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)
        self._job = job
        self._blocks_each = -(-(job.context_tokens + job.steps + 1) // BLOCK_TOKENS)
        blocks = max(job.batch_max * self._blocks_each, -(-job.prompt_tokens_max // BLOCK_TOKENS))
        self._memory = bytearray(layout.block_bytes * blocks)
        choice = choose_engine(card, layout, weights=WEIGHTS.get(job.weights, "dense"))
        memory = memoryview(self._memory)
        self._engine = load_engine(card, layout, memory, dtype=dtype, threads=job.threads, choice=choice)
        self._engine.warm_up()
        self.version = str(choice)
        rng = random.Random(2)
        for index in range(job.batch_max):
            self._run([self._slice(index, draw(rng, job.context_tokens), 0)])

    def prefill(self, prompt: list[int]) -> float:
        blocks = range(-(-len(prompt) // BLOCK_TOKENS))
        part = _slice(prompt, 0, [BlockId(block) for block in blocks])
        started = time.perf_counter()
        self._run([part])
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]]) -> list[float]:
        texts = [[*prompt, 100] for prompt in prompts]
        seconds = []
        for _ in range(self._job.steps):
            started = time.perf_counter()
            drawn = self._run([self._slice(index, text, len(text) - 1) for index, text in enumerate(texts)])
            seconds.append(time.perf_counter() - started)
            for text, token in zip(texts, drawn, strict=True):
                text.append(token)
        return seconds

    def _slice(self, index: int, tokens: list[int], start: int) -> Slice:
        first = index * self._blocks_each
        return _slice(tokens, start, [BlockId(first + block) for block in range(self._blocks_each)])

    def _run(self, parts: list[Slice]) -> list[int]:
        return [result.token or 0 for result in self._engine.execute(Step(tuple(parts))).slices]


def _slice(tokens: list[int], start: int, table: list[BlockId]) -> Slice:
    return Slice(
        request_id=RequestId(str(table[0])),
        tokens=tokens,
        start=start,
        count=len(tokens) - start,
        block_table=table,
        sample=True,
        sampling=Sampling(temperature=0.0),
        prompt_tokens=len(tokens),
    )


if __name__ == "__main__":
    serve(BatonPeer)
