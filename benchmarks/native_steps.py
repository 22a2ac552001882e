"""Compare steps of the native engine with the limits of the machine at the same time, and with the torch engine.

python benchmarks/native_steps.py [--threads 1 2] [--dtype float32 bfloat16] [--repeats 5] [--torch] [--rounds 1]
                                  [--experts | --latent]

With --torch, the two engines take turns in separate processes, `rounds` times. The round with the least CPU time counts
for each step. --experts uses a random mixture of experts like Mixtral instead of SmolLM2-135M. --latent uses a random
model with latent attention and experts, like DeepSeek-V2-Lite.

A limit is the larger of two times: bytes to read / bandwidth, and products / rate of products. Both rates are measured
between the steps (native_limits.cpp). `share` is limit / step by wall time. `cpu_share` is the same by CPU time of
limits and steps. On a busy machine it omits the time of other processes, but not the memory bandwidth that they use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import record
import torch
from safetensors.torch import save_file

from baton.compute.load_engine import EngineChoice, choose_engine, load_engine
from baton.compute.models.config_json import read_config_json
from baton.compute.models.model_config import ModelConfig
from baton.compute.models.open_model import read_config
from baton.compute.models.resolve import resolve_model
from baton.compute.models.tensor_names import expected_shapes
from baton.compute.step_engine import StepEngine
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling
from baton.move.compiling import find_compiler

CONTEXT_TOKENS = 500
BLOCK_TOKENS = 16
REQUESTS_MAX = 32
TOKEN_MAX = 40000
LIMITS = Path(__file__).parent / "native_limits.cpp"
CELL_BYTES = {"float32": 4, "bfloat16": 2}
DENSE_MODEL = "smollm2-135m"
SMALL = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": TOKEN_MAX,
    "tie_word_embeddings": True,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
}
MIXTURE = SMALL | {
    "architectures": ["MixtralForCausalLM"],
    "intermediate_size": 2048,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""A small config.json like Mixtral's: 253 million weights, 212 in the layers, of which a token uses 61."""
LATENT = SMALL | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "intermediate_size": 4096,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 704,
    "first_k_dense_replace": 1,
}
"""A config.json like DeepSeek-V2-Lite's, with its attention and half of its other widths: 202 million weights."""
RANDOM = {"experts": ("random mixture of experts", MIXTURE), "latent": ("random latent attention", LATENT)}
"""The random models: their description, and their config.json."""


@dataclass(frozen=True)
class Needs:
    """The bytes to read, and the products to compute."""

    bytes_read: float
    flops: float

    def limit_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.bytes_read / bytes_per_s, self.flops / flops_per_s)


@dataclass
class Case:
    """One kind of step: its bytes and products, and its measured times."""

    parts: list[Slice]
    needs: Needs
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def cases(config: ModelConfig, dtype: str) -> dict[str, Case]:
    """Return prefill steps of 512 and 2,048 tokens, and decode steps of 1, 8 and 32 requests after 500 tokens."""
    rng = random.Random(0)
    blocks_each = -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS)
    found: dict[str, Case] = {}
    for batch in (1, 8, 32):
        prompts = [[rng.randrange(TOKEN_MAX) for _ in range(CONTEXT_TOKENS + 1)] for _ in range(batch)]
        parts = [slice_of(index, tokens, CONTEXT_TOKENS, blocks_each) for index, tokens in enumerate(prompts)]
        found[f"decode_{batch}"] = Case(parts, total(needs(config, dtype, parts)))
    for count in (512, 2048):
        tokens = [rng.randrange(TOKEN_MAX) for _ in range(count)]
        parts = [slice_of(0, tokens, 0, count // BLOCK_TOKENS)]
        found[f"prefill_{count}"] = Case(parts, total(needs(config, dtype, parts)))
    return found


def slice_of(index: int, tokens: list[int], start: int, blocks: int) -> Slice:
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


def needs(config: ModelConfig, dtype: str, parts: list[Slice]) -> dict[str, Needs]:
    """Return the bytes and products of the layers, of attention and of the output projection."""
    attention, cached, per_pair = _attention(config)
    head = config.hidden * config.vocab_tokens
    rows, layers = sum(part.count for part in parts), config.layers
    mlps_read, mlps_multiplied = _mlps(config, rows)
    pairs = sum(part.count * (part.start + (part.count + 1) / 2) for part in parts)  # query and key
    kv_tokens = sum(part.start + part.count for part in parts)
    cell = CELL_BYTES[dtype]
    return {
        "products": Needs(cell * (layers * attention + mlps_read), 2.0 * rows * (layers * attention + mlps_multiplied)),
        "attention": Needs(cell * layers * cached * kv_tokens, 2.0 * layers * per_pair * pairs),
        "projection": Needs(cell * head, 2.0 * len(parts) * head),
    }


def total(parts: dict[str, Needs]) -> Needs:
    return Needs(sum(part.bytes_read for part in parts.values()), sum(part.flops for part in parts.values()))


def _attention(config: ModelConfig) -> tuple[int, int, int]:
    """Return the weights of one layer, its cached numbers per token, and its products per query and cached token.

    Latent attention is counted in its absorbed form, which the native engine computes.
    """
    latent, hidden, heads = config.latent, config.hidden, config.heads
    if latent is None:
        width, kv_width = heads * config.head_dim, config.kv_heads * config.head_dim
        return hidden * (2 * width + 2 * kv_width), 2 * kv_width, 2 * width
    query, values = heads * (latent.nope_dim + latent.rope_dim), heads * latent.value_dim
    queries = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    up = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    weights = queries + hidden * config.head_dim + up + values * hidden
    return weights, config.head_dim, heads * (config.head_dim + latent.kv_rank)


def _mlps(config: ModelConfig, rows: int) -> tuple[float, float]:
    """Return the weights of MLPs that a step reads (for evenly chosen experts), and those that a row uses."""
    routed = 0 if config.experts is None else len(config.experts.layers)
    whole = 3.0 * config.hidden * config.intermediate * (config.layers - routed)
    if config.experts is None:
        return whole, whole
    count, used = config.experts.count, config.experts.per_token
    expert = 3.0 * config.hidden * config.experts.intermediate
    shared = 3.0 * config.hidden * config.experts.shared_intermediate
    met = expert * count * (1.0 - (1.0 - used / count) ** rows)
    return whole + routed * (met + shared), whole + routed * (expert * used + shared)


def make_random(config: dict[str, Any], folder: Path) -> None:
    """Write a model with random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape) / 50
        for name, shape in expected_shapes(read_config_json(folder)).items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")


def load(model: str, dtype: str, threads: int, engine: str) -> tuple[StepEngine, str]:
    card = resolve_model(model)
    layout = card.layout(block_tokens=BLOCK_TOKENS, dtype=dtype)  # type: ignore[arg-type]
    arena = np.zeros(layout.block_bytes * REQUESTS_MAX * -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS), dtype=np.uint8)
    kind = "<u2" if dtype == "bfloat16" else "<f4"
    arena.view(kind)[:] = 0x3DCC if dtype == "bfloat16" else 0.1  # memory that was never written costs nothing to read
    choice = EngineChoice(kind="torch") if engine == "torch" else choose_engine(card, layout)
    memory = memoryview(arena)
    return load_engine(card, layout, memory, dtype=dtype, threads=threads, choice=choice), str(choice)  # type: ignore[arg-type]


def measure(model: str, dtype: str, threads: int, repeats: int, kind: str) -> dict[str, Any]:
    """Measure all cases and the limits in turns."""
    config = read_config(resolve_model(model))
    engine, name = load(model, dtype, threads, kind)
    engine.warm_up()
    found, limits = cases(config, dtype), dict.fromkeys(limit_names(dtype), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled_limits(Path(folder))
        for _ in range(repeats):
            limits = raised(limits, program, threads, dtype)
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


def compiled_limits(folder: Path) -> Path:
    program = folder / "limits"
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    wide = ("-mavx512f", "-mavx512bw", "-mavx512vl") if has_avx512 else ("-mavx2", "-mfma")
    subprocess.run([find_compiler(), "-O3", "-w", *wide, "-pthread", str(LIMITS), "-o", str(program)], check=True)
    return program


def raised(limits: dict[str, float], program: Path, threads: int, dtype: str) -> dict[str, float]:
    """Measure the limits of the machine now, and return the best so far."""
    size = str(CELL_BYTES[dtype] * 134_500_000)
    done = subprocess.run([str(program), str(threads), size], capture_output=True, check=True, text=True)
    seen = msgspec.json.decode(done.stdout)
    return {key: max(best, seen[key]) for key, best in limits.items()}


def limit_names(dtype: str) -> tuple[str, ...]:
    return ("bytes_per_s", f"{dtype}_flops", "cpu_bytes_per_s", f"cpu_{dtype}_flops")


def report(case: Case, limits: dict[str, float], threads: int) -> dict[str, float]:
    bytes_per_s, flops_per_s, cpu_bytes_per_s, cpu_flops_per_s = limits.values()
    limit_s = case.needs.limit_s(bytes_per_s, flops_per_s)
    cpu_limit_s = case.needs.limit_s(cpu_bytes_per_s, cpu_flops_per_s)
    best = min(case.wall_s)
    tokens = sum(part.count for part in case.parts)
    return {
        "min_s": best,
        "median_s": record.spread(case.wall_s)["median"],
        "cpu_min_s": min(case.cpu_s),
        "limit_s": limit_s,
        "share": limit_s / best,
        "cpu_share": cpu_limit_s * threads / min(case.cpu_s),
        "bandwidth_share": case.needs.bytes_read / best / bytes_per_s,
        "rate_share": case.needs.flops / best / flops_per_s,
        "tokens_per_s": tokens / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--torch", action="store_true", help="the torch engine beside it")
    instead = parser.add_mutually_exclusive_group()
    for name, (what, _) in RANDOM.items():
        instead.add_argument(
            f"--{name}", dest="random", action="store_const", const=name, help=f"{what} instead of SmolLM2-135M"
        )
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:  # in a process of its own: threads are pinned, and pools do not outlive their setting
        kind, model = args.one
        found = measure(model, args.dtype[0], args.threads[0], args.repeats, kind)
        print(msgspec.json.encode(found).decode())
        return
    kinds = ("native", "torch") if args.torch else ("native",)
    with tempfile.TemporaryDirectory() as folder:
        what, made = RANDOM.get(args.random, ("SmolLM2-135M", None))
        if made is not None:
            make_random(made, Path(folder))
        model = DENSE_MODEL if made is None else folder
        figures: dict[str, dict[str, Any]] = {}
        for _, threads, dtype, kind in itertools.product(range(args.rounds), args.threads, args.dtype, kinds):
            command = [sys.executable, __file__, "--one", kind, model, "--threads", str(threads), "--dtype", dtype]
            command += ["--repeats", str(args.repeats)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            name = f"{kind}, {dtype}, {threads} threads"
            figures[name] = quicker(figures.get(name), msgspec.json.decode(done.stdout))
    record.write(
        "-".join(["native-steps", *([args.random] if args.random else []), *args.dtype]),
        {"what": f"{what}, one step; decode after 500 tokens", "figures": figures},
    )


def quicker(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Return for each step the round with the least CPU time, which other load disturbed least."""
    if one is None:
        return other
    best = {
        key: min(one["steps"][key], step, key=lambda found: found["cpu_min_s"]) for key, step in other["steps"].items()
    }
    return {**other, "steps": best}


if __name__ == "__main__":
    main()
