"""Shared by the GPU benchmarks: their arguments, their time budget, timing by events, and the machine's ceilings."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import record
import torch

from baton.compute.torch.kernels.paged_kv import PagedKV

SECONDS = 120.0
CALLS_MAX = 50
CALLS_MIN = 5
CASE_S = 2.0
"""The repeats of one figure take about this long."""


def arguments(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no further case after this time")
    parser.add_argument("--out", type=Path, default=record.RESULTS, help="folder of the result file")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, to prove the code")
    return parser.parse_args()


def missing(*, rehearse: bool) -> str:
    """Return what this machine lacks, or an empty string."""
    if not rehearse and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


@dataclass(slots=True)
class Budget:
    """The time of one benchmark. Cases that do not fit are named in its result."""

    limit_s: float
    left_out: list[str] = field(default_factory=list)
    _began_s: float = field(default_factory=time.perf_counter)

    def allows(self, case: str, needed_s: float = 0.0) -> bool:
        """Return whether a case may begin: it begins, and has `needed_s`, before the limit. If not, note it."""
        if time.perf_counter() - self._began_s + needed_s < self.limit_s:
            return True
        self.left_out.append(case)
        return False


def timed(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median time of a call, seconds. The calls take turns, each over data of its own."""
    began_s = time.perf_counter()
    for call in calls:
        call()
    synchronize(device)
    first_s = max(1e-6, (time.perf_counter() - began_s) / len(calls))
    repeats = int(min(CALLS_MAX, max(CALLS_MIN, CASE_S / first_s)))
    return statistics.median(_time(calls[index % len(calls)], device) for index in range(repeats))


def replayed(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Return the median time of a call inside a CUDA graph of all calls: without the time of Python's launches."""
    if device.type == "cpu":
        return timed(calls, device)
    for call in calls:  # kernels compile, and libraries allocate, before the capture
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return timed([graph.replay], device) / len(calls)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates that this machine reached with torch's own kernels. Figures are shares of them."""

    copy_bytes_per_s: float
    """Of a copy within device memory, bytes read and written."""
    matmul_flop_per_s: float
    """Of a square bfloat16 matrix product of random numbers."""

    def floor_s(self, size_bytes: float, flop: float) -> float:
        """Return the least time for moving these bytes and computing these operations."""
        return max(size_bytes / self.copy_bytes_per_s, flop / self.matmul_flop_per_s)


def ceilings(device: torch.device, *, rehearse: bool) -> Ceilings:
    """Measure both rates."""
    size_bytes, side = (1 << 22, 128) if rehearse else (1 << 32, 8192)
    return Ceilings(2 * size_bytes / _copy_s(device, size_bytes), 2 * side**3 / _product_s(device, side))


def _copy_s(device: torch.device, size_bytes: int) -> float:
    target, source = (torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return timed([lambda: target.copy_(source)], device)


def _product_s(device: torch.device, side: int) -> float:
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return timed([lambda: torch.mm(left, right)], device)


def described(device: torch.device, found: Ceilings) -> dict[str, object]:
    """Return the device and its ceilings, for a result file."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (rehearsal)",
        "torch": torch.__version__,
        "copy_gb_per_s": found.copy_bytes_per_s / 1e9,
        "matmul_tflop_per_s": found.matmul_flop_per_s / 1e12,
    }


def random_kv(kv: PagedKV) -> None:
    """Fill KV with random numbers, a part at a time. Random bytes could be NaN, in the scales of fp8 as well."""
    for part in kv.data:
        if kv.layout.dtype == "fp8":
            part.random_(0, 256)
        else:
            part.normal_()
    if kv.layout.dtype == "fp8":
        kv.scales[..., -1] = 1.0 / 256.0
