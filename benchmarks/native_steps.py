"""Steps of the native engine against what the machine can do at the same moment, and against the torch engine.

python benchmarks/native_steps.py [--threads 1 2] [--dtype float32 bfloat16] [--repeats 5] [--torch]

A limit is the larger of two times: bytes that must be read over the bandwidth, products over the rate of products, both
measured between the steps (native_limits.cpp). `share` is limit / step, by the clock. `cpu_share` is the same by CPU
time, of limits as of steps: on a busy machine it leaves out the time that others had the cores, though not the memory
bandwidth that they took.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import record

from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.engine.load import EngineChoice, choose_engine, load_engine
from baton.engine.model_config import ModelConfig
from baton.engine.port import StepEngine
from baton.engine.resolve import read_config, resolve_model
from baton.machine.compiling import find_compiler

CONTEXT_TOKENS = 500
BLOCK_TOKENS = 16
REQUESTS_MAX = 32
LIMITS = Path(__file__).parent / "native_limits.cpp"
CELL_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass
class Case:
    """One kind of step: what it must read and multiply, and how long it took."""

    parts: list[Slice]
    bytes_read: float
    flops: float
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def cases(config: ModelConfig, dtype: str) -> dict[str, Case]:
    """Prefill of 512 and 2,048 tokens; decode of 1, 8 and 32 requests after 500 tokens."""
    rng = random.Random(0)
    blocks_each = -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS)
    found: dict[str, Case] = {}
    for batch in (1, 8, 32):
        tokens = [rng.randrange(40000) for _ in range(CONTEXT_TOKENS + 1)]
        parts = [_slice(index, tokens, CONTEXT_TOKENS, blocks_each) for index in range(batch)]
        found[f"decode_{batch}"] = _case(config, dtype, parts)
    for count in (512, 2048):
        tokens = [rng.randrange(40000) for _ in range(count)]
        found[f"prefill_{count}"] = _case(config, dtype, [_slice(0, tokens, 0, count // BLOCK_TOKENS)])
    return found


def _slice(index: int, tokens: list[int], start: int, blocks: int) -> Slice:
    return Slice(
        request_id=RequestId(str(index)),
        tokens=tokens,
        start=start,
        count=len(tokens) - start,
        block_table=[BlockId(index * blocks + block) for block in range(blocks)],
        sample=True,
        sampling=Sampling(temperature=0.0),
        prompt_tokens=len(tokens),
    )


def _case(config: ModelConfig, dtype: str, parts: list[Slice]) -> Case:
    width = config.heads * config.head_dim
    kv_width = config.kv_heads * config.head_dim
    layer = config.hidden * (2 * width + 2 * kv_width + 3 * config.intermediate)
    head = config.hidden * config.vocab_tokens
    rows, layers = sum(part.count for part in parts), config.layers
    pairs = sum(part.count * (part.start + (part.count + 1) / 2) for part in parts)  # query and key
    kv_tokens = sum(part.start + part.count for part in parts)
    return Case(
        parts,
        bytes_read=CELL_BYTES[dtype] * (layers * (layer + 2 * kv_width * kv_tokens) + head),
        flops=2.0 * (rows * layers * layer + len(parts) * head) + 4.0 * layers * width * pairs,
    )


def load(dtype: str, threads: int, *, torch: bool) -> tuple[StepEngine, str]:
    card = resolve_model("smollm2-135m")
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)  # type: ignore[arg-type]
    arena = np.zeros(layout.block_bytes * REQUESTS_MAX * -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS), dtype=np.uint8)
    kind = "<u2" if dtype == "bfloat16" else "<f4"
    arena.view(kind)[:] = 0x3DCC if dtype == "bfloat16" else 0.1  # memory that was never written costs nothing to read
    choice = EngineChoice(kind="torch") if torch else choose_engine(card, layout)
    memory = memoryview(arena)
    return load_engine(card, layout, memory, dtype=dtype, threads=threads, choice=choice), str(choice)  # type: ignore[arg-type]


def measure(dtype: str, threads: int, repeats: int, *, torch: bool) -> dict[str, object]:
    """Run all cases and the limits in turn."""
    config = read_config(resolve_model("smollm2-135m"))
    engine, name = load(dtype, threads, torch=torch)
    engine.warm_up()
    found, limits = cases(config, dtype), dict.fromkeys(_names(dtype), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "limits"
        flags = ("-O3", "-w", "-mavx512f", "-mavx512bw", "-mavx512vl", "-pthread")
        subprocess.run([find_compiler(), *flags, str(LIMITS), "-o", str(program)], check=True)
        for _ in range(repeats):
            size = str(CELL_BYTES[dtype] * 134_500_000)
            done = subprocess.run([str(program), str(threads), size], capture_output=True, check=True, text=True)
            seen = msgspec.json.decode(done.stdout)
            limits = {key: max(best, seen[key]) for key, best in limits.items()}
            for case in found.values():
                cpu_s, wall_s = time.process_time(), time.perf_counter()
                engine.execute(Step(tuple(case.parts)))
                case.wall_s.append(time.perf_counter() - wall_s)
                case.cpu_s.append(time.process_time() - cpu_s)
    return {
        "engine": name,
        "limits": limits,
        "steps": {key: report(case, limits, threads) for key, case in found.items()},
    }


def _names(dtype: str) -> tuple[str, ...]:
    return ("bytes_per_s", f"{dtype}_flops", "cpu_bytes_per_s", f"cpu_{dtype}_flops")


def report(case: Case, limits: dict[str, float], threads: int) -> dict[str, float]:
    bytes_per_s, flops_per_s, cpu_bytes_per_s, cpu_flops_per_s = limits.values()
    limit_s = max(case.bytes_read / bytes_per_s, case.flops / flops_per_s)
    cpu_limit_s = max(case.bytes_read / cpu_bytes_per_s, case.flops / cpu_flops_per_s)
    best = min(case.wall_s)
    tokens = sum(part.count for part in case.parts)
    return {
        "min_s": best,
        "median_s": record.spread(case.wall_s)["median"],
        "cpu_min_s": min(case.cpu_s),
        "limit_s": limit_s,
        "share": limit_s / best,
        "cpu_share": cpu_limit_s * threads / min(case.cpu_s),
        "bandwidth_share": case.bytes_read / best / bytes_per_s,
        "rate_share": case.flops / best / flops_per_s,
        "tokens_per_s": tokens / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="the torch engine beside it")
    parser.add_argument("--one", choices=["native", "torch"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # in a process of its own: threads are pinned, and pools do not outlive their setting
        found = measure(args.dtype[0], args.threads[0], args.repeats, torch=args.one == "torch")
        print(msgspec.json.encode(found).decode())
        return
    figures = {}
    for threads in args.threads:
        for dtype in args.dtype:
            for kind in ("native", "torch") if args.torch else ("native",):
                command = [sys.executable, __file__, "--one", kind, "--threads", str(threads), "--dtype", dtype]
                command += ["--repeats", str(args.repeats)]
                done = subprocess.run(command, capture_output=True, check=True, text=True)
                figures[f"{kind}, {dtype}, {threads} threads"] = msgspec.json.decode(done.stdout)
    record.write(
        "-".join(["native-steps", *args.dtype]),
        {"what": "SmolLM2-135M, one step; decode after 500 tokens", "figures": figures},
    )


if __name__ == "__main__":
    main()
