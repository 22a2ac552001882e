"""Measure single steps of the engine, and derive a linear cost model.

python benchmarks/engine_steps.py [--threads 1 2] [--dtype float32 bfloat16] [--repeats 7]
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time

import msgspec
import record

from baton.compute.load_engine import load_engine
from baton.compute.models.resolve import resolve_model
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling

CONTEXT_TOKENS = 500
BLOCK_TOKENS = 16


def measure(threads: int, dtype: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return the seconds of prefill steps of 512 and 2,048 tokens, and of decode steps of 1, 8 and 32 requests."""
    card = resolve_model("smollm2-135m")
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)  # type: ignore[arg-type]
    blocks_each = -(-(CONTEXT_TOKENS + 64) // BLOCK_TOKENS)
    memory = memoryview(bytearray(layout.block_bytes * max(32 * blocks_each, 128)))
    engine = load_engine(card, layout, memory, dtype=dtype, threads=threads)  # type: ignore[arg-type]
    engine.warm_up()
    rng = random.Random(0)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for tokens in (512, 2048):
            prompt = part(0, [rng.randrange(40000) for _ in range(tokens)], 0, tokens, tokens // BLOCK_TOKENS)
            found.setdefault(f"prefill_{tokens}", []).append(timed(engine, [prompt]))
        for batch in (1, 8, 32):
            tokens = [rng.randrange(40000) for _ in range(CONTEXT_TOKENS + 1)]
            parts = [part(index, tokens, CONTEXT_TOKENS, 1, blocks_each) for index in range(batch)]
            found.setdefault(f"decode_{batch}", []).append(timed(engine, parts))
    return {name: record.spread(times) for name, times in found.items()}


def part(index: int, tokens: list[int], start: int, count: int, blocks: int) -> Slice:
    return Slice(
        request_id=RequestId(str(index)),
        tokens=tokens,
        start=start,
        count=count,
        block_table=[BlockId(index * blocks + block) for block in range(blocks)],
        sample=True,
        sampling=Sampling(temperature=0.0),
        prompt_tokens=len(tokens),
    )


def timed(engine: object, parts: list[Slice]) -> float:
    started = time.perf_counter()
    engine.execute(Step(tuple(parts)))  # type: ignore[attr-defined]
    return time.perf_counter() - started


def fit(steps: dict[str, dict[str, float]]) -> dict[str, float]:
    """Derive the coefficients of `baton.decide.cost.linear.LinearCost` from the medians."""
    median = {name: spread["median"] for name, spread in steps.items()}
    decode_request_s = (median["decode_32"] - median["decode_8"]) / 24
    prefill_token_s = (median["prefill_2048"] - median["prefill_512"]) / 1536
    return {
        "step_overhead_s": median["decode_1"] - decode_request_s,
        "prefill_token_s": prefill_token_s,
        "decode_request_s": decode_request_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # in a process of its own, so that thread pools do not outlive their setting
        print(msgspec.json.encode(measure(args.threads[0], args.dtype[0], args.repeats)).decode())
        return
    figures = {}
    for threads in args.threads:
        for dtype in args.dtype:
            command = [sys.executable, __file__, "--one", "--threads", str(threads), "--dtype", dtype]
            done = subprocess.run(
                [*command, "--repeats", str(args.repeats)], capture_output=True, check=True, text=True
            )
            steps = msgspec.json.decode(done.stdout)
            figures[f"{dtype}, {threads} threads"] = {"steps_s": steps, "linear_cost": fit(steps)}
    record.write(
        "engine-steps", {"what": "SmolLM2-135M, one step, seconds; context of decodes 500", "figures": figures}
    )


if __name__ == "__main__":
    main()
