"""Observe the native engine's threads: `native_threads.py`, in a separate process, because it pins itself.

Prints one line of JSON: the number of threads that an engine of one thread starts, the cores of the threads of an
engine of two, and the CPU time of a helper between steps.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from tests.unit.compute.native_fuzz import Engine
from tests.unit.compute.native_models import Shape, Weights

WORK = 300_000
"""Loop passes of the main thread while the helper is observed: some ten milliseconds."""


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def state_of(thread: int) -> str:
    """Return R for a running thread, S for a sleeping one."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()[0]


def ran_ns(thread: int) -> int:
    """Return the CPU time of a thread in nanoseconds."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    weights = Weights(Shape.draw(random.Random(0)), np.random.default_rng(0))
    library = NativeLibrary(library_path())
    before = threads()
    alone = Engine(library, weights, 4, 1)
    alone.step([([1, 2, 3], 0, [0])])
    started_by_one = len(threads() - before)
    pinned = cores if len(cores) == 2 else None
    pair = Engine(library, weights, 4, 2, cores=pinned)
    for _ in range(5):
        pair.step([([1, 2, 3], 0, [0])])
    (helper,) = threads() - before
    while state_of(helper) != "S":
        os.sched_yield()
    ran = ran_ns(helper)
    sum(range(WORK))
    print(
        json.dumps(
            {
                "started_by_one": started_by_one,
                "cores": cores,
                "main_on": sorted(os.sched_getaffinity(0)),
                "helper_on": sorted(os.sched_getaffinity(helper)),
                "idle_ns": ran_ns(helper) - ran,
            }
        )
    )
    pair.library.free(pair.handle)
    alone.library.free(alone.handle)


if __name__ == "__main__":
    main()
