"""Ask the native engine for more threads than memory allows: `native_crowd.py`, in a separate process with limited
memory. Prints the error.
"""

from __future__ import annotations

import random
import resource
from pathlib import Path

import numpy as np

from baton.compute.native.build import library_path
from baton.compute.native.library import NativeLibrary
from baton.core.errors import ModelError
from tests.unit.compute.native_fuzz import Engine
from tests.unit.compute.native_models import Shape, Weights

THREADS = 1000
SPARE_BYTES = 64 << 20
"""Memory for the stacks of some threads, but not of all."""


def main() -> None:
    weights = Weights(Shape.draw(random.Random(0)), np.random.default_rng(0))
    library = NativeLibrary(library_path())
    held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + SPARE_BYTES, resource.RLIM_INFINITY))
    try:
        Engine(library, weights, 4, THREADS)
    except ModelError as error:
        print(error)


if __name__ == "__main__":
    main()
