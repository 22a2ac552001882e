"""Measure one model on several rank processes of this machine.

python benchmarks/ranks.py [--shapes 1x1 2x1 1x2 2x2] [--threads N] [--layers N] [--repeats 5]

A random Llama of SmolLM2-135M's size, but with 8 query heads on 4 KV heads, so that two ranks can divide them. A shape
is tensor x pipeline. Every shape runs in a separate process with its ranks, on the same cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import record
import torch
import transformers

from baton.compute.load_engine import EngineChoice, load_engine, load_parallel_engine
from baton.compute.models.resolve import resolve_model
from baton.compute.step_engine import StepEngine
from baton.core.config import Config, ParallelConfig, Topology
from baton.core.kv_config import KVConfig
from baton.core.step import Slice, Step
from baton.core.types import BlockId, HostId, RequestId, Sampling
from baton.serve.host.build import build_host, choose_computing
from baton.serve.worker.crew import RankCrew

CONTEXT_TOKENS = 500
BLOCK_TOKENS = 16
BLOCKS_EACH = -(-(CONTEXT_TOKENS + 64) // BLOCK_TOKENS)
VOCAB = 49152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x1", "2x1", "1x2", "2x2"])
    parser.add_argument("--threads", type=int, default=2, help="of the whole worker, divided among tensor ranks")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        tensor, pipeline = map(int, args.shapes[0].split("x"))
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        print(msgspec.json.encode(measure(args.one, parallel, args.threads, args.repeats)).decode())
        return
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers)
        for shape in args.shapes:
            command = [sys.executable, __file__, "--one", folder, "--shapes", shape, "--threads", str(args.threads)]
            done = subprocess.run([*command, "--repeats", str(args.repeats)], stdout=subprocess.PIPE, check=True)
            figures[shape] = msgspec.json.decode(done.stdout)
    record.write(
        "ranks", {"what": "steps in seconds, memory of each rank in bytes", "threads": args.threads, "figures": figures}
    )
    print("| tensor x pipeline | decode_1, ms | decode_8, ms | prefill_512, tokens/s | largest rank, MiB |")
    print("|---|---|---|---|---|")
    for shape, found in figures.items():
        decode = [f"{found[name]['median'] * 1e3:.1f}" for name in ("decode_1", "decode_8")]
        prefill = 512 / found["prefill_512"]["median"]
        print(f"| {shape} | {decode[0]} | {decode[1]} | {prefill:,.0f} | {max(found['rank_bytes']) / 2**20:,.0f} |")


def make_model(folder: Path, layers: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=72,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def measure(folder: str, parallel: ParallelConfig, threads: int, repeats: int) -> dict[str, object]:
    """Time prefill steps of 512 tokens and decode steps of 1 and 8 requests, and measure each rank's memory."""
    card = resolve_model(folder)
    kv = KVConfig(blocks=8 * BLOCKS_EACH, block_tokens=BLOCK_TOKENS)
    config = Config(
        topology=Topology(mixed=1), parallel=parallel, threads=threads, kv=kv, device="cpu", dtype="float32"
    )
    host = build_host(config, card, choose_computing(config, card), HostId("bench"))
    setup, memory = host.setups[0], host.arena.memory
    pids = ["self"]
    engine: StepEngine
    if setup.layout.ranks == 1:
        torch_choice = EngineChoice(kind="torch")
        engine = load_engine(card, setup.layout, memory, dtype="float32", threads=threads, choice=torch_choice)
    else:
        crew, each = RankCrew(setup, host.arena.fd), max(1, threads // parallel.tensor)
        engine = load_parallel_engine(card, setup.layout, memory, crew, dtype="float32", threads=each)
        pids += [str(pid) for pid in crew.pids]
    engine.warm_up()
    found: dict[str, object] = dict(_steps(engine, repeats))
    found["rank_bytes"] = [_private_bytes(pid) for pid in pids]
    if setup.layout.ranks > 1:
        crew.close()
    return found


def _steps(engine: StepEngine, repeats: int) -> dict[str, dict[str, float]]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        prompt = [_part(0, [rng.randrange(VOCAB) for _ in range(512)], 0, 512)]
        times.setdefault("prefill_512", []).append(_timed(engine, prompt))
        for batch in (1, 8):
            tokens = [rng.randrange(VOCAB) for _ in range(CONTEXT_TOKENS + 1)]
            parts = [_part(index, tokens, CONTEXT_TOKENS, 1) for index in range(batch)]
            steps = [_timed(engine, parts) for _ in range(3)]
            times.setdefault(f"decode_{batch}", []).append(statistics.median(steps))
    return {name: record.spread(values[1:]) for name, values in times.items()}  # the first round warms up


def _part(index: int, tokens: list[int], start: int, count: int) -> Slice:
    return Slice(
        request_id=RequestId(str(index)),
        tokens=tokens,
        start=start,
        count=count,
        block_table=[BlockId(index * BLOCKS_EACH + block) for block in range(BLOCKS_EACH)],
        sample=True,
        sampling=Sampling(temperature=0.0),
        prompt_tokens=len(tokens),
    )


def _timed(engine: StepEngine, parts: list[Slice]) -> float:
    started = time.perf_counter()
    engine.execute(Step(tuple(parts)))
    return time.perf_counter() - started


def _private_bytes(pid: str) -> int:
    """Return the private memory of this process: weights and scratch, without the arena and mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
