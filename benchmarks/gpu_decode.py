"""Measure paged decode attention on a GPU (microseconds, GB/s of KV): Baton's Triton kernels and torch's attention.

python benchmarks/gpu_decode.py [--repeats 20]      (by `make gpu`; without a GPU it prints what is missing)

Every repeat runs over another set of blocks, so that the second-level cache does not answer for the memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence

import record
import torch
from torch import Tensor

from baton.compute.torch.kernels.attention_backend import AttentionBackend
from baton.compute.torch.kernels.paged_kv import PagedKV, Row
from baton.compute.torch.kernels.torch_sdpa import SdpaBackend
from baton.decide.kv.layout import KVLayout

BLOCK_TOKENS = 16
SETS = 4
GROUPED = {"heads": 32, "kv_heads": 8, "head_dim": 128, "planes": 2, "rope_dim": 0}
LATENT = {"heads": 16, "kv_heads": 1, "head_dim": 576, "planes": 1, "rope_dim": 64}
BATCHES = {"b1_64k": [65536], "b64_512": [512] * 64, "b128_4k": [4096] * 128, "ragged": [4641, 45118, 1730, 1696]}


def missing() -> str:
    """Return what this machine lacks, or an empty string."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def measure(sizes: dict[str, int], lengths: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Time one layer of one batch, and return median seconds and GB/s per backend."""
    try:
        from baton.compute.triton.launch import TritonBackend, TritonDecodeKernel
    except ImportError as error:
        raise SystemExit("the kernels need triton, which PyTorch's CUDA builds bring: pip install triton") from error
    layout = KVLayout(
        layers=SETS,
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        block_tokens=BLOCK_TOKENS,
        dtype="bfloat16",
        planes=2 if sizes["planes"] == 2 else 1,
    )
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    kv = PagedKV(torch.zeros(layout.block_bytes * sum(counts), dtype=torch.uint8, device="cuda"), layout)
    kv.data.normal_()
    tables = torch.randperm(sum(counts)).split(counts)
    rows = [
        Row(index, 1, length - 1, blocks) for index, (length, blocks) in enumerate(zip(lengths, tables, strict=True))
    ]
    queries = torch.randn(len(rows), sizes["heads"], sizes["head_dim"], device="cuda", dtype=torch.bfloat16)
    kernel = TritonDecodeKernel(products=torch.bfloat16, rope_dim=sizes["rope_dim"])
    backends: dict[str, AttentionBackend] = {"triton": TritonBackend(kernel), "torch_sdpa": SdpaBackend()}
    read_bytes = sum(lengths) * layout.token_bytes // layout.layers
    found: dict[str, dict[str, float]] = {}
    for name, backend in backends.items():
        plan = backend.plan(rows, kv)
        seconds = timed([_layer(plan.run, layer, queries) for layer in range(SETS)], repeats)
        found[name] = {"median_s": seconds, "gb_per_s": read_bytes / seconds / 1e9}
    return found


def _layer(run: Callable[[int, Tensor, None], Tensor], layer: int, queries: Tensor) -> Callable[[], Tensor]:
    return lambda: run(layer, queries, None)


def timed(calls: Sequence[Callable[[], Tensor]], repeats: int) -> float:
    """Return the median of device times, seconds."""
    for call in calls:
        call()
    times: list[float] = []
    for index in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        calls[index % len(calls)]()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    lacks = missing()
    if lacks:
        print(f"gpu_decode: not run: {lacks}")
        return 0
    results: dict[str, object] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    with torch.inference_mode():
        for kind, sizes in (("grouped", GROUPED), ("latent", LATENT)):
            for name, lengths in BATCHES.items():
                found = measure(sizes, lengths, args.repeats)
                results[f"{kind}_{name}"] = found
                words = ", ".join(
                    f"{backend} {one['median_s'] * 1e6:.1f} us {one['gb_per_s']:.0f} GB/s"
                    for backend, one in found.items()
                )
                print(f"{kind} {name}: {', '.join(words)}", flush=True)
    record.write("gpu-decode", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
