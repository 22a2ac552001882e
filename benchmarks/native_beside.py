"""Find what a mixed step of the native engine could gain from decoding beside the products of a prompt.

python benchmarks/native_beside.py [--prompt 512] [--batch 16] [--contexts 500 2000] [--rounds 7]

Two threads compute a prompt and then a decode step, as a mixed step does phase by phase; or one computes the prompt
while the other computes decode steps. Figures are CPU time, the median of the rounds in which the threads had their
cores to themselves (`kept`; if it is 0, the least of all rounds). `bound`: CPU time one after the other / beside. A
mixed step that keeps one thread on each kind of work cannot be faster by more, because it cannot balance both
perfectly. The rounds take turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import record
from native_grid import BLOCK_TOKENS, DTYPE, NUMBER, Case, load
from native_parts import library_of
from native_steps import DENSE_MODEL

from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.step import Step
from baton.move.arena.memfd import create_arena

THREADS = 2
SHARE_MIN = 0.9
"""The least share of a core's time with which a reading counts."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The time of one computation."""

    cpu_s: float
    share_ratio: float
    """CPU time over the time of the cores. Lower where other processes ran on them."""


def both_threads(engine: StepEngine, step: Step) -> Reading:
    """Time a step on both threads of this process."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    engine.execute(step)
    cpu_s = time.process_time() - began_cpu_s
    return Reading(cpu_s, cpu_s / (THREADS * (time.perf_counter() - began_s)))


def one_thread(engine: StepEngine, step: Step) -> Reading:
    """Time a step on the calling thread."""
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    engine.execute(step)
    cpu_s = time.thread_time() - began_cpu_s
    return Reading(cpu_s, cpu_s / (time.perf_counter() - began_s))


def beside(prompts: StepEngine, prompt: Step, decodes: StepEngine, decode: Step) -> tuple[Reading, Reading]:
    """Time a prompt on one thread, and the decode steps on another one that end before it does."""
    is_done, found = threading.Event(), list[Reading]()

    def keep_decoding() -> None:
        while not is_done.is_set():
            found.append(one_thread(decodes, decode))

    thread = threading.Thread(target=keep_decoding)
    thread.start()
    of_prompt = one_thread(prompts, prompt)
    is_done.set()
    thread.join()
    ended = found[:-1] or found
    return of_prompt, sorted(ended, key=lambda reading: reading.cpu_s)[len(ended) // 2]


def typical_s(readings: list[Reading]) -> tuple[float, int]:
    """Return the CPU time of the readings that had their cores to themselves, and the number of these readings."""
    kept = [reading.cpu_s for reading in readings if reading.share_ratio >= SHARE_MIN]
    return (statistics.median(kept), len(kept)) if kept else (min(reading.cpu_s for reading in readings), 0)


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Return the CPU time of each computation, and the ratios of their sums."""
    block_bytes = resolve_model(DENSE_MODEL).layout(block_tokens=BLOCK_TOKENS, dtype=DTYPE).block_bytes
    arena = create_arena(block_bytes * case.requests * case.blocks_each)
    np.frombuffer(arena.memory, dtype="<u2")[:] = NUMBER
    library = {"this tree": library_of("", Path())}
    both, one, other = (load(library, "bfloat16", arena, threads)["this tree"] for threads in (THREADS, 1, 1))
    *requests, prompt = case.parts()
    steps = {"prompt": Step((prompt,)), "decode": Step(tuple(requests)), "mixed": Step((*requests, prompt))}
    found: dict[str, list[Reading]] = {}
    for _ in range(rounds):
        for name, step in steps.items():
            found.setdefault(name, []).append(both_threads(both, step))
        pair = beside(one, steps["prompt"], other, steps["decode"])
        for name, reading in zip(("prompt_beside", "decode_beside"), pair, strict=True):
            found.setdefault(name, []).append(reading)
    typical = {name: typical_s(readings) for name, readings in found.items()}
    seconds = {name: each for name, (each, _) in typical.items()}
    apart = seconds["prompt"] + seconds["decode"]
    return {
        **{f"{name}_s": each for name, each in seconds.items()},
        "kept": min(kept for _, kept in typical.values()),
        "mixed_ratio": apart / seconds["mixed"],
        "bound_ratio": apart / (seconds["prompt_beside"] + seconds["decode_beside"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="*", default=[500, 2000])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cases = [Case(args.batch, context, prompt=args.prompt) for context in args.contexts]
    found = {case.name: measure(case, args.rounds) for case in cases}
    for name, figures in found.items():
        print(name, {key: round(value, 4) for key, value in figures.items()})
    record.write("native-beside", {"what": "SmolLM2-135M in bfloat16, CPU time on two threads", "cases": found})


if __name__ == "__main__":
    main()
