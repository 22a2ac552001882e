"""Divide the time of a decode step of the native engine into parts, and compare two versions of the library.

python benchmarks/native_parts.py [--threads 1 2] [--batch 1 8 32] [--rounds 30] [--clock wall|cpu] [--against COMMIT]

A part is the difference to a step without it. A step without earlier tokens has almost no attention, and one that
does not sample has no output projection. If all requests have the same prefix, attention reads keys and values from the
second-level cache. Each part has a limit as in native_steps.py: the larger of bytes / bandwidth and products / rate.
The arena is that of a worker: shared memory with small pages. The type is bfloat16. `--clock cpu` is for a busy machine
and one thread: it omits the time of other processes, which makes differences of wall times meaningless.

With --against, the library of that commit is built, too. The two take turns, step by step in one process, so that other
load affects both. The interface (library.py) of both commits must be the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import record
from msgspec import structs
from native_steps import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    DENSE_MODEL,
    REQUESTS_MAX,
    TOKEN_MAX,
    Needs,
    compiled_limits,
    limit_names,
    needs,
    raised,
    slice_of,
    total,
)

from baton.compute.load_engine import EngineChoice, load_engine
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.native.build import FULL_ENGINE, library_path
from baton.compute.step_engine import StepEngine
from baton.core.step import Slice, Step
from baton.move.arena.memfd import create_arena

DTYPE = "bfloat16"
ROOT = Path(__file__).resolve().parents[1]
NATIVE = "src/baton/compute/native"
HEADERS = "src/baton/move"
"""Has headers that the native engine includes."""
HALVES = 0x3DCC
"""A bfloat16 number to fill the arena with, because reading memory that was never written takes no time."""


def library_of(commit: str, folder: Path) -> Path:
    """Build the native library of a commit, or of this tree if no commit is given."""
    if not commit:
        return library_path()
    archive = subprocess.run(["git", "archive", commit, NATIVE, HEADERS], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    units = {unit: flags for unit, flags in FULL_ENGINE.units.items() if (folder / NATIVE / f"{unit}.cpp").exists()}
    headers = tuple(folder / header.relative_to(ROOT) for header in FULL_ENGINE.headers)
    return dataclasses.replace(FULL_ENGINE, folder=folder / NATIVE, units=units, headers=headers).library_path()


def load(libraries: dict[str, str], threads: int) -> dict[str, StepEngine]:
    """Create one engine per library, all over one arena."""
    card = resolve_model(DENSE_MODEL)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=DTYPE)
    arena = create_arena(layout.block_bytes * REQUESTS_MAX * _blocks_each())
    np.frombuffer(arena.memory, dtype="<u2")[:] = HALVES
    choices = {name: EngineChoice(kind="native", library=Path(path)) for name, path in libraries.items()}
    engines = {
        name: load_engine(card, layout, arena.memory, dtype=DTYPE, threads=threads, choice=choice)
        for name, choice in choices.items()
    }
    for engine in engines.values():
        engine.warm_up()
    return engines


def _blocks_each() -> int:
    return -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS)


def steps(batch: int) -> dict[str, list[Slice]]:
    """Return a decode step, one without sampling, one with a common prefix, and one without earlier tokens."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(TOKEN_MAX) for _ in range(CONTEXT_TOKENS + 1)] for _ in range(batch)]
    whole = [slice_of(index, tokens, CONTEXT_TOKENS, _blocks_each()) for index, tokens in enumerate(prompts)]
    unsampled = [structs.replace(part, sample=False) for part in whole]
    prefix = whole[0].block_table[:-1]
    shared = [structs.replace(part, block_table=[*prefix, part.block_table[-1]]) for part in unsampled]
    alone = [structs.replace(part, tokens=part.tokens[:1], start=0) for part in unsampled]
    return {"whole": whole, "unsampled": unsampled, "shared": shared, "alone": alone}


def least_s(
    engines: dict[str, StepEngine], batch: int, rounds: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Return the shortest time (seconds) of each step on each engine. Each round has its own order of turns."""
    rng = random.Random(0)
    turns = [(name, kind, parts) for name in engines for kind, parts in steps(batch).items()]
    least = {name: dict.fromkeys(steps(batch), float("inf")) for name in engines}
    for _ in range(rounds):
        rng.shuffle(turns)
        for name, kind, parts in turns:
            started_s = clock()
            engines[name].execute(Step(tuple(parts)))
            least[name][kind] = min(least[name][kind], clock() - started_s)
    return least


def parts_of(least: dict[str, float]) -> dict[str, float]:
    """Return the parts of a step in seconds, from the four steps."""
    return {
        "products": least["alone"],
        "attention": least["unsampled"] - least["alone"],
        "attention, from the cache": least["shared"] - least["alone"],
        "projection": least["whole"] - least["unsampled"],
        "step": least["whole"],
    }


def parts_needs(found: dict[str, Needs]) -> dict[str, Needs]:
    """Return the bytes and products of each part, in the order of the table."""
    return {
        "products": found["products"],
        "attention": found["attention"],
        "attention, from the cache": dataclasses.replace(found["attention"], bytes_read=0.0),
        "projection": found["projection"],
        "step": total(found),
    }


def measure(libraries: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    threads, on_cpu = args.threads[0], args.clock == "cpu"
    config = read_config(resolve_model(DENSE_MODEL))
    engines = load(libraries, threads)
    limits = dict.fromkeys(limit_names(DTYPE), 0.0)
    found: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = compiled_limits(Path(folder))
        for batch in args.batch:
            limits = raised(limits, program, threads, DTYPE)
            least = least_s(engines, batch, args.rounds, time.process_time if on_cpu else time.perf_counter)
            found[batch] = {name: parts_of(of) for name, of in least.items()}
    bytes_per_s, flops_per_s = list(limits.values())[2:] if on_cpu else list(limits.values())[:2]
    rows: list[dict[str, Any]] = []
    for batch, by_library in found.items():
        for part, need in parts_needs(needs(config, DTYPE, steps(batch)["whole"])).items():
            limit_s = need.limit_s(bytes_per_s, flops_per_s)
            seconds = {name: of[part] for name, of in by_library.items()}
            rows.append({"batch": batch, "part": part, "limit_s": limit_s, "seconds": seconds})
    return {"limits": limits, "rows": rows}


def rendered(threads: int, rows: list[dict[str, Any]]) -> str:
    """Return a table of milliseconds and shares of the limit."""
    names = list(rows[0]["seconds"])
    heads = ["threads", "batch", "part", "limit, ms", *(f"{name}, ms (share of the limit)" for name in names)]
    lines = [
        [str(threads), str(row["batch"]), row["part"], f"{row['limit_s'] * 1e3:.1f}"]
        + [f"{s * 1e3:.1f} ({row['limit_s'] / s:.0%})" for s in row["seconds"].values()]
        for row in rows
    ]
    return record.table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--against", default="", metavar="COMMIT", help="take turns with the library of this commit")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # in a process of its own: threads are pinned, and pools do not outlive their setting
        libraries = msgspec.json.decode(args.one, type=dict[str, str])
        print(msgspec.json.encode(measure(libraries, args)).decode())
        return
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        commits = {"this tree": "", **({args.against: args.against} if args.against else {})}
        libraries = {name: str(library_of(commit, Path(folder))) for name, commit in commits.items()}
        for threads in args.threads:
            command = [sys.executable, __file__, "--one", msgspec.json.encode(libraries).decode()]
            command += ["--threads", str(threads), "--rounds", str(args.rounds)]
            command += ["--clock", args.clock, "--batch", *map(str, args.batch)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            figures[str(threads)] = msgspec.json.decode(done.stdout)
    record.write("native-parts", {"what": "SmolLM2-135M in bfloat16, one decode step", "threads": figures})
    for threads, found in figures.items():
        print(rendered(int(threads), found["rows"]), end="\n\n")


if __name__ == "__main__":
    main()
