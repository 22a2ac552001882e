"""Time steps of the native engine over batch sizes, contexts and precisions, beside the limit of the machine.

python benchmarks/native_grid.py [--weights bfloat16 int8 int4] [--batch 1 2 4 8 16 32 64] [--contexts 64 500 2000]
                                 [--prompts 128 512 2048] [--mixed 512] [--rounds 5] [--turn-s 0.1]
                                 [--against COMMIT] [--record] [--clock wall|cpu] [--name native-grid]

A case is a decode step of BATCHxCONTEXT, a prompt of so many tokens, or (--mixed) a decode step with a prompt. A turn
repeats a case for --turn-s; a round gives every library one turn per case, in random order. The table has the median
of the rounds' fastest steps. A limit is the larger of bytes / bandwidth and products / rate (native_limits.cpp).
Quantized weights are counted at the rate of bfloat16. With --against, the library of that commit is measured beside
that of this tree.
`--clock cpu` is for a busy machine and one thread: it omits the time of other processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import record
from native_parts import library_of
from native_steps import DENSE_MODEL, TOKEN_MAX, Needs, compiled_limits, limit_names, needs, raised, slice_of, total

from baton.compute.load_engine import EngineChoice, load_engine
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.config import WeightsChoice
from baton.core.step import Slice, Step
from baton.move.arena.memfd import Arena, create_arena

BLOCK_TOKENS = 16
DTYPE = "bfloat16"
STORED: dict[str, WeightsChoice] = {"bfloat16": "dense", "int8": "int8", "int4": "stored"}
"""The option of `--weights` that loads each precision."""
WEIGHT_BYTES = {"bfloat16": 1.0, "int8": 0.531, "int4": 0.358}
"""The bytes of the embedded model's weights at each precision, over those in bfloat16 (peers/table.py)."""
NUMBER = 0x3DCC
"""A bfloat16 number to fill the arena with, because reading memory that was never written takes no time."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step after `context` tokens, or (context 0) prompts of `tokens` tokens.

    A mixed step is a decode step with one prompt of `prompt` tokens.
    """

    batch: int
    context: int
    tokens: int = 1
    prompt: int = 0

    @property
    def name(self) -> str:
        decode = f"{self.batch} x {self.context}"
        if self.prompt:
            return f"prompt of {self.prompt} + {decode}"
        return decode if self.tokens == 1 else f"prompt {self.batch} x {self.tokens}"

    @property
    def requests(self) -> int:
        return self.batch + (self.prompt > 0)

    @property
    def blocks_each(self) -> int:
        return -(-max(self.prompt, self.context + self.tokens) // BLOCK_TOKENS)

    def parts(self) -> tuple[Slice, ...]:
        rng = random.Random(self.batch)
        prompts = [[rng.randrange(TOKEN_MAX) for _ in range(self.context + self.tokens)] for _ in range(self.batch)]
        found = [slice_of(i, tokens, self.context, self.blocks_each) for i, tokens in enumerate(prompts)]
        if self.prompt:
            tokens = [rng.randrange(TOKEN_MAX) for _ in range(self.prompt)]
            found.append(slice_of(self.batch, tokens, 0, self.blocks_each))
        return tuple(found)


def load(libraries: dict[str, Path], weights: str, arena: Arena, threads: int) -> dict[str, StepEngine]:
    card = resolve_model(DENSE_MODEL)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=DTYPE)
    engines = {
        name: load_engine(
            card, layout, arena.memory, dtype=DTYPE, threads=threads,
            choice=EngineChoice(kind="native", library=path, weights=STORED[weights]),
        )
        for name, path in libraries.items()
    }  # fmt: skip
    for engine in engines.values():
        engine.warm_up()
    return engines


def fastest_s(engine: StepEngine, step: Step, turn_s: float, clock: Callable[[], float]) -> float:
    """Return the fastest of the steps that fit into `turn_s`, at least two."""
    least, count, until_s = float("inf"), 0, clock() + turn_s
    while count < 2 or clock() < until_s:
        started_s = clock()
        engine.execute(step)
        least, count = min(least, clock() - started_s), count + 1
    return least


def measure(
    engines: dict[str, StepEngine], cases: list[Case], rounds: int, turn_s: float, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Return the median over rounds for each case and engine."""
    rng = random.Random(0)
    steps = {case.name: Step(case.parts()) for case in cases}
    found: dict[str, dict[str, list[float]]] = {case: {name: [] for name in engines} for case in steps}
    for _ in range(rounds):
        for case, step in steps.items():
            names = list(engines)
            rng.shuffle(names)
            for name in names:
                found[case][name].append(fastest_s(engines[name], step, turn_s, clock))
    return {case: {name: statistics.median(turns) for name, turns in of.items()} for case, of in found.items()}


def case_needs(case: Case, weights: str) -> Needs:
    found = needs(read_config(resolve_model(DENSE_MODEL)), DTYPE, list(case.parts()))
    share = WEIGHT_BYTES[weights]
    for part in ("products", "projection"):
        found[part] = Needs(found[part].bytes_read * share, found[part].flops)
    return total(found)


def limit_s(case: Case, weights: str, rates: list[float]) -> float:
    bytes_per_s, flops_per_s = rates
    return case_needs(case, weights).limit_s(bytes_per_s, flops_per_s)


def limited_by(case: Case, weights: str, rates: list[float]) -> str:
    bytes_per_s, flops_per_s = rates
    need = case_needs(case, weights)
    return "memory" if need.bytes_read / bytes_per_s > need.flops / flops_per_s else "products"


def render(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0]["seconds"])
    heads = ["weights", "case", "limit, ms", "by", *(f"{name}, ms (share)" for name in names)]
    lines = [
        [row["weights"], row["case"], f"{row['limit_s'] * 1e3:.2f}", row["limited_by"]]
        + [f"{s * 1e3:.2f} ({row['limit_s'] / s:.0%})" for s in row["seconds"].values()]
        for row in rows
    ]
    return record.table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=list(STORED), choices=list(STORED))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 500, 2000])
    parser.add_argument("--prompts", type=int, nargs="*", default=[])
    parser.add_argument("--mixed", type=int, nargs="*", default=[], help="tokens of a prompt in each decode step")
    parser.add_argument("--prompts-at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--against", nargs="*", default=[], metavar="COMMIT")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/NAME.json")
    parser.add_argument("--name", default="native-grid", help="of the result, such as native-grid-avx2")
    args = parser.parse_args()
    on_cpu = args.clock == "cpu"
    cases = [Case(batch, context) for context in args.contexts for batch in args.batch]
    cases += [Case(args.prompts_at_once, 0, tokens) for tokens in args.prompts]
    cases += [
        Case(batch, context, prompt=tokens)
        for tokens in args.mixed
        for context in args.contexts
        for batch in args.batch
    ]
    block_bytes = resolve_model(DENSE_MODEL).layout(block_tokens=BLOCK_TOKENS, dtype=DTYPE).block_bytes
    arena = create_arena(block_bytes * max(case.requests * case.blocks_each for case in cases))
    np.frombuffer(arena.memory, dtype="<u2")[:] = NUMBER
    with tempfile.TemporaryDirectory() as folder:
        libraries = {"this tree": library_of("", Path(folder))}
        for commit in args.against:
            libraries[commit] = Path(commit) if Path(commit).exists() else library_of(commit, Path(folder))
        limits = raised(dict.fromkeys(limit_names(DTYPE), 0.0), compiled_limits(Path(folder)), args.threads, DTYPE)
        rates = list(limits.values())[2:] if on_cpu else list(limits.values())[:2]
        clock = time.process_time if on_cpu else time.perf_counter
        rows: list[dict[str, Any]] = []
        for weights in args.weights:
            engines = load(libraries, weights, arena, args.threads)
            for case, seconds in measure(engines, cases, args.rounds, args.turn_s, clock).items():
                of = next(one for one in cases if one.name == case)
                row = {"weights": weights, "case": case, "limit_s": limit_s(of, weights, rates)}
                rows.append(row | {"limited_by": limited_by(of, weights, rates), "seconds": seconds})
    if args.record:
        made = {"threads": args.threads, "clock": args.clock, "limits": limits, "rows": rows}
        record.write(args.name, {"what": "SmolLM2-135M, one step", **made})
    print({name: f"{value:.3g}" for name, value in limits.items()})
    print(render(rows))


if __name__ == "__main__":
    main()
