"""How fast KV is converted from one layout to another, beside a plain memcpy of the same bytes in the same run.

    conversion.py [--tokens N] [--repeats N] [--only TEXT] [--json NAME]

Every case converts a request's blocks from one arena into another, blocks in a row or scattered. Bytes are the mean of
those read and those written, as a memcpy reads and writes what it copies; `times_memcpy` is the conversion's time over
that of a memcpy of as many, `cpu_times_memcpy` the same of CPU time, which depends less on what else runs. A sample is
one of each, one after the other, over memory that no cache holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import record

from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.copy_plan import CopyPlan
from baton.decide.kv.layout import KVLayout
from baton.move.number_formats import encode
from baton.move.transport.convert import convert

SMOLLM2 = KVLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
LLAMA_8B = KVLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
LATENT = KVLayout(layers=27, kv_heads=1, head_dim=576, block_tokens=16, dtype="bfloat16", planes=1)
MODELS = {"smollm2-135m": SMOLLM2, "llama-3.1-8b": LLAMA_8B, "deepseek-v2-lite": LATENT}


@dataclass(frozen=True)
class Case:
    """A pair of layouts: what differs from the model's own."""

    name: str
    model: str
    source: dict[str, Any]
    target: dict[str, Any]
    scattered: bool = False


CASES = (
    Case("same layout", "llama-3.1-8b", {}, {}),
    Case("same layout", "llama-3.1-8b", {}, {}, scattered=True),
    Case("block 16 to 128", "llama-3.1-8b", {}, {"block_tokens": 128}, scattered=True),
    Case("block 128 to 16", "llama-3.1-8b", {"block_tokens": 128}, {}, scattered=True),
    Case("block 16 to 24", "llama-3.1-8b", {}, {"block_tokens": 24}, scattered=True),
    Case("pipeline 2 to 1", "llama-3.1-8b", {"pipeline_parallel": 2}, {}, scattered=True),
    Case("tensor 2 to 1", "llama-3.1-8b", {"tensor_parallel": 2}, {}),
    Case("tensor 2 to 1", "llama-3.1-8b", {"tensor_parallel": 2}, {}, scattered=True),
    Case("tensor 1 to 8", "llama-3.1-8b", {}, {"tensor_parallel": 8}),
    Case("tensor 1 to 8", "llama-3.1-8b", {}, {"tensor_parallel": 8}, scattered=True),
    Case("token-major to head-major", "llama-3.1-8b", {}, {"order": "head_major"}, scattered=True),
    Case("bfloat16 to float32", "llama-3.1-8b", {}, {"dtype": "float32"}, scattered=True),
    Case("float32 to bfloat16", "llama-3.1-8b", {"dtype": "float32"}, {}, scattered=True),
    Case("float32 to int8", "llama-3.1-8b", {"dtype": "float32"}, {"dtype": "int8"}, scattered=True),
    Case("int8 to float32", "llama-3.1-8b", {"dtype": "int8"}, {"dtype": "float32"}, scattered=True),
    Case("float32 to fp8", "llama-3.1-8b", {"dtype": "float32"}, {"dtype": "fp8"}, scattered=True),
    Case("fp8 to float32", "llama-3.1-8b", {"dtype": "fp8"}, {"dtype": "float32"}, scattered=True),
    Case("bfloat16 to int8", "llama-3.1-8b", {}, {"dtype": "int8"}, scattered=True),
    Case("int8 to bfloat16", "llama-3.1-8b", {"dtype": "int8"}, {}, scattered=True),
    Case("bfloat16 to fp4", "llama-3.1-8b", {}, {"dtype": "fp4"}, scattered=True),
    Case("fp4 to bfloat16", "llama-3.1-8b", {"dtype": "fp4"}, {}, scattered=True),
    Case("bfloat16 to mxfp4", "llama-3.1-8b", {}, {"dtype": "mxfp4"}, scattered=True),
    Case("mxfp4 to bfloat16", "llama-3.1-8b", {"dtype": "mxfp4"}, {}, scattered=True),
    Case("block 16 to 128", "smollm2-135m", {}, {"block_tokens": 128}, scattered=True),
    Case("tensor 1 to 3", "smollm2-135m", {}, {"tensor_parallel": 3}, scattered=True),
    Case("float32 to bfloat16", "smollm2-135m", {"dtype": "float32"}, {}, scattered=True),
    Case("latent, tensor 1 to 4", "deepseek-v2-lite", {}, {"tensor_parallel": 4}, scattered=True),
)


def table(layout: KVLayout, tokens: int, *, scattered: bool, seed: int) -> tuple[BlockId, ...]:
    """A block table: in a row, or in any order."""
    count = -(-tokens // layout.block_tokens)
    ids = np.random.default_rng(seed).permutation(count) if scattered else np.arange(count)
    return tuple(BlockId(int(block)) for block in ids)


def arena(layout: KVLayout, tokens: int) -> np.ndarray:
    """Memory for so many tokens, touched, full of numbers of the layout's type."""
    cells_count = -(-tokens // layout.block_tokens) * layout.block_bytes // layout.head_bytes
    numbers = np.random.default_rng(1).normal(size=(512, layout.head_dim)).astype(np.float32)
    cells = np.empty((512, layout.head_bytes), np.uint8)
    encode(numbers, layout.dtype, cells)
    return np.resize(cells, (cells_count, layout.head_bytes)).reshape(-1)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Time a call: seconds on the wall, and of this process's CPU."""
    started_s, cpu_before_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started_s, time.process_time() - cpu_before_s


def measure(case: Case, tokens: int, repeats: int) -> dict[str, Any]:
    """Time planning once, and converting and a memcpy in turn."""
    model = MODELS[case.model]
    source_layout, target_layout = (msgspec.structs.replace(model, **fields) for fields in (case.source, case.target))
    source, target = arena(source_layout, tokens), arena(target_layout, tokens)
    tables = [
        table(layout, tokens, scattered=case.scattered, seed=seed)
        for seed, layout in enumerate((source_layout, target_layout))
    ]
    plans: list[CopyPlan] = []
    plan_s, _ = timed(lambda: plans.append(Conversion(source_layout, target_layout).plan(*tables, range(tokens))))
    plan = plans[0]
    size = min(plan.read_bytes, len(target))
    copied: list[tuple[float, float]] = []
    converted: list[tuple[float, float]] = []
    for _ in range(repeats):
        copied.append(timed(lambda: np.copyto(target[:size], source[:size])))
        converted.append(timed(lambda: convert(plan, memoryview(source), memoryview(target))))
    memcpy_s, memcpy_cpu_s = (statistics.median(column) for column in zip(*copied[1:], strict=True))
    convert_s, convert_cpu_s = (statistics.median(column) for column in zip(*converted[1:], strict=True))
    written_bytes = tokens * target_layout.token_bytes
    moved_bytes = (plan.read_bytes + written_bytes) / 2
    return {
        "case": case.name,
        "model": case.model,
        "blocks": "scattered" if case.scattered else "in a row",
        "tokens": tokens,
        "read_bytes": plan.read_bytes,
        "written_bytes": written_bytes,
        "reads": len(plan.reads),
        "staging_bytes": plan.staging_bytes,
        "copies": len(plan.copies),
        "plan_s": round(plan_s, 6),
        "convert_s": round(convert_s, 6),
        "gb_per_s": round(moved_bytes / 1e9 / convert_s, 2),
        "memcpy_gb_per_s": round(size / 1e9 / memcpy_s, 2),
        "times_memcpy": round(convert_s / (memcpy_s * moved_bytes / size), 2),
        "cpu_times_memcpy": round(convert_cpu_s / (memcpy_cpu_s * moved_bytes / size), 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time conversions between KV layouts beside memcpy.")
    parser.add_argument("--tokens", type=int, default=1920)
    parser.add_argument("--repeats", type=int, default=7, help="samples of each; the first is left out")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", default="conversion")
    options = parser.parse_args(arguments)
    rows = [measure(case, options.tokens, options.repeats) for case in CASES if options.only in case.name]
    for row in rows:
        case = f"{row['model']:17} {row['case']:26} {row['blocks']:10}"
        print(f"{case} {row['gb_per_s']:6} GB/s {row['times_memcpy']:6}x, by CPU time {row['cpu_times_memcpy']:6}x")
    record.write(options.json, {"figures": rows})


if __name__ == "__main__":
    main()
