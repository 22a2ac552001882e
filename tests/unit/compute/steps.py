"""Slices, and runs of engines, for the tests of engines. Needs neither transformers nor model files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.compute.step_engine import StepEngine
from baton.core.step import Slice, SliceResult, Step
from baton.core.types import BlockId, RequestId, Sampling

GREEDY = Sampling(temperature=0.0)


def part_of(
    tokens: Sequence[int], table: Sequence[int], *, start: int = 0, end: int | None = None, **options: object
) -> Slice:
    """Build the slice [start, end) of a request. It samples if it contains the last token."""
    end = len(tokens) if end is None else end
    values: dict[str, object] = {
        "request_id": RequestId("r"),
        "sampling": GREEDY,
        "prompt_tokens": len(tokens),
        "sample": end == len(tokens),
        **options,
    }
    return Slice(
        tokens=tokens, start=start, count=end - start, block_table=[BlockId(block) for block in table], **values
    )


def run(engine: StepEngine, *parts: Slice) -> list[SliceResult]:
    return list(engine.execute(Step(parts)).slices)


def generate(
    engine: StepEngine, prompt: Sequence[int], table: Sequence[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """Generate `count` tokens of one request."""
    tokens = list(prompt)
    start = 0
    while len(tokens) < len(prompt) + count:
        part = part_of(tokens, table, start=start, sampling=sampling, prompt_tokens=len(prompt))
        token = run(engine, part)[0].token
        assert token is not None
        start = len(tokens)
        tokens.append(token)
    return tokens[len(prompt) :]


def all_logprobs(engine: StepEngine, tokens: Sequence[int], table: Sequence[int], vocab: int) -> np.ndarray:
    """Return the log probabilities of the whole vocabulary after every token but the last: [tokens - 1, vocab]."""
    sampling = Sampling(temperature=0.0, top_logprobs=vocab, prompt_logprobs=True)
    result = run(engine, part_of(tokens, table, sampling=sampling))[0]
    rows = np.full((len(tokens) - 1, vocab), np.nan)
    for row, entry in zip(rows, result.prompt_logprobs, strict=True):
        for token, logprob in entry.top:
            row[token] = logprob
    return rows
