"""Measure the limits of the machine between the turns of the engines: bytes and products per second."""

from __future__ import annotations

import ctypes
import math
import subprocess
import time
from pathlib import Path

import torch

READ_SIZES_BYTES = (96 << 20, 160 << 20, 288 << 20, 576 << 20)
"""Sizes near those of a decode step with 4-bit, 8-bit, bfloat16 and float32 weights. Smaller ones fit partly into
the cache."""
DOT_ROUNDS = 1_500_000
MATRIX_SIZES = ((512, 576, 1536), (1024, 1024, 1024), (2048, 2048, 2048))


class Limits:
    """The best rates so far. Call `measure` once per round; the best of all rounds is the limit."""

    def __init__(self, folder: Path, threads: int) -> None:
        library = folder / "limits.so"
        source = Path(__file__).with_name("limits.cpp")
        command = ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._dll = ctypes.CDLL(str(library))
        self._dll.limits_read.restype = ctypes.c_double
        self._dll.limits_dot.restype = ctypes.c_double
        self._dll.limits_dot_operations.restype = ctypes.c_double
        self._dll.limits_memory.restype = ctypes.c_void_p
        self._threads = threads
        self.read_bytes_per_s: dict[int, float] = {}
        self.flops: dict[str, float] = {}

    def measure(self) -> None:
        largest = max(READ_SIZES_BYTES)
        memory = ctypes.c_void_p(self._dll.limits_memory(ctypes.c_int64(largest)))
        for size in READ_SIZES_BYTES:
            best_s = min(self._dll.limits_read(memory, ctypes.c_int64(size), self._threads) for _ in range(4))
            self.read_bytes_per_s[size] = max(self.read_bytes_per_s.get(size, 0.0), size / best_s)
        self._dll.limits_free(memory)
        for kind in ("float32", "bfloat16"):
            self.flops[kind] = max(self.flops.get(kind, 0.0), self._dot_rate(kind), self._matrix_rate(kind))

    def _dot_rate(self, kind: str) -> float:
        arguments = (ctypes.c_int64(DOT_ROUNDS), self._threads, int(kind == "bfloat16"))
        best_s = min(self._dll.limits_dot(*arguments) for _ in range(3))
        return self._dll.limits_dot_operations(*arguments) / best_s

    def _matrix_rate(self, kind: str) -> float:
        torch.set_num_threads(self._threads)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
        best = 0.0
        for rows, inner, columns in MATRIX_SIZES:
            a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)
            for _ in range(3):
                started = time.perf_counter()
                torch.mm(a, b)
                best = max(best, 2 * rows * inner * columns / (time.perf_counter() - started))
        return best

    def read_rate(self, size_bytes: float) -> float:
        """Return bytes per second for the nearest measured size."""
        nearest = min(self.read_bytes_per_s, key=lambda size: abs(math.log(size / size_bytes)))
        return self.read_bytes_per_s[nearest]
