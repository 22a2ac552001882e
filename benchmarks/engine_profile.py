"""Measure steps of the engine over a grid, and fit the cost model. `baton.decide.cost.fitted` loads both files.

python benchmarks/engine_profile.py [--threads 2] [--dtype bfloat16] [--weights dense] [--rounds 4]

Writes benchmarks/results/NAME-steps.json (a StepProfile) and NAME-fit.json (a FittedCost, and its error on every fifth
step, which is not used for the fit). Each round measures the whole grid, and the shortest time of each step counts.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

import msgspec
import record

from baton.compute.load_engine import choose_engine, load_engine
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling, prefill_pairs
from baton.decide.cost.fitted import StepPoint, StepProfile, fit_cost, save_fitted

BLOCK_TOKENS = 16
CONTEXTS_TOKENS = (32, 250, 700, 1500)
BATCHES = (0, 1, 2, 4, 8, 16, 32)
CHUNKS_TOKENS = (0, 16, 48, 128, 256, 512)
CACHED_TOKENS = (0, 400)
REQUESTS_MAX = max(BATCHES) + 1
CONTEXT_TOKENS_MAX = 1600


@dataclass(frozen=True)
class Case:
    """A step: some decoding requests with the same context, and at most one chunk of a prompt."""

    decodes: int
    context_tokens: int
    chunk_tokens: int
    cached_tokens: int

    def point(self, step_s: float) -> StepPoint:
        return StepPoint(
            prefill_tokens=self.chunk_tokens,
            prefill_chunks=int(self.chunk_tokens > 0),
            prefill_pairs=prefill_pairs(self.chunk_tokens, self.cached_tokens) if self.chunk_tokens else 0.0,
            decode_requests=self.decodes,
            context_tokens=self.decodes * self.context_tokens,
            step_s=step_s,
        )


def grid(rng: random.Random) -> list[Case]:
    """Return every decode batch at every context, every chunk, and a sample of combined steps, in random order."""
    decodes = [Case(batch, context, 0, 0) for batch in BATCHES[1:] for context in CONTEXTS_TOKENS]
    chunks = [Case(0, 0, chunk, cached) for chunk in CHUNKS_TOKENS[1:] for cached in CACHED_TOKENS]
    mixed = [
        Case(
            rng.choice(BATCHES[1:]),
            rng.choice(CONTEXTS_TOKENS),
            rng.choice(CHUNKS_TOKENS[1:]),
            rng.choice(CACHED_TOKENS),
        )
        for _ in range(30)
    ]
    cases = [*decodes, *chunks, *mixed]
    rng.shuffle(cases)
    return cases


def step_of(case: Case, tokens: list[int]) -> Step:
    """Build the step. Every request has its own blocks; those of the chunk are the last."""
    parts = [_slice(index, tokens[: case.context_tokens + 1], case.context_tokens) for index in range(case.decodes)]
    if case.chunk_tokens:
        parts.append(_slice(REQUESTS_MAX - 1, tokens[: case.cached_tokens + case.chunk_tokens], case.cached_tokens))
    return Step(tuple(parts))


def _slice(index: int, tokens: list[int], start: int) -> Slice:
    blocks = CONTEXT_TOKENS_MAX // BLOCK_TOKENS
    return Slice(
        request_id=RequestId(str(index)),
        tokens=tokens,
        start=start,
        count=len(tokens) - start,
        block_table=[BlockId(index * blocks + block) for block in range(blocks)],
        sample=True,
        sampling=Sampling(temperature=0.0),
        prompt_tokens=len(tokens),
    )


def timed(engine: StepEngine, step: Step) -> float:
    started = time.perf_counter()
    engine.execute(step)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--weights", choices=("dense", "stored", "int8"), default="dense")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--name", default="engine-profile")
    args = parser.parse_args()
    card = resolve_model("smollm2-135m")
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=args.dtype)
    memory = memoryview(bytearray(layout.block_bytes * (REQUESTS_MAX * CONTEXT_TOKENS_MAX // BLOCK_TOKENS)))
    choice = choose_engine(card, layout, weights=args.weights)
    engine = load_engine(card, layout, memory, dtype=args.dtype, threads=args.threads, choice=choice)
    engine.warm_up()
    rng = random.Random(0)
    cases = grid(rng)
    tokens = [rng.randrange(100, 49000) for _ in range(CONTEXT_TOKENS_MAX)]
    least = [float("inf")] * len(cases)
    for number in range(args.rounds):
        least = [min(before, timed(engine, step_of(case, tokens))) for before, case in zip(least, cases, strict=True)]
        print(f"round {number + 1} of {args.rounds}", flush=True)
    where = record.environment()
    log = StepProfile(
        engine=f"{choice.kind}, {args.threads} threads, {args.dtype}, weights {args.weights}, {where['commit']}",
        llm=card.name,
        machine=f"{where['cpu']}, load before {where['load_before']}",
        points=tuple(case.point(step_s) for case, step_s in zip(cases, least, strict=True)),
    )
    cost = fit_cost(log)
    record.RESULTS.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(log), indent=1).decode()
    (record.RESULTS / f"{args.name}-steps.json").write_text(text + "\n")
    (record.RESULTS / f"{args.name}-fit.json").write_text(save_fitted(cost))
    print(save_fitted(cost))


if __name__ == "__main__":
    main()
