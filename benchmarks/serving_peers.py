"""Compare Baton apart (1P1D), Baton mixed, and `vllm serve` through HTTP, with vLLM's own load generator.

    python benchmarks/engines.py --install FOLDER       installs vLLM's CPU build into FOLDER/vllm
    python benchmarks/serving_peers.py --peers FOLDER [--rounds 3] [--dtype float32] [--quick]

All three serve the same weights of SmolLM2-135M-Instruct on all cores, in the same dtype. vLLM computes bfloat16 well
on CPUs with AVX-512 only: on others, measure in float32. `vllm bench serve` sends the load, so no figure is measured by
Baton's own client. The servers run one after the other, in turns for several rounds: a figure is the median of its
rounds. Two loads:

- closed: 256 tokens in, 64 out, at concurrency 1, 8 and 32;
- goodput: 400 +-50 % tokens in, 80 out, bursty arrivals (burstiness 0.5) at `--offered-rps`; a request counts when its
  TTFT and TPOT are within `--slo-ms`. The defaults suit two cores with AVX-512 and bfloat16; slower CPUs need others.

Prompts are random tokens, so no prompt is cached. Writes benchmarks/results/serving-peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import record
from peers.models import write_folder

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
SERVERS = ("baton 1P1D", "baton mixed", "vllm serve")
FIGURES = (
    "output_throughput",
    "request_throughput",
    "request_goodput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "p99_itl_ms",
    "completed",
    "failed",
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all servers have in common: their weights and dtype, the interpreter of vLLM, and the load for goodput."""

    model: Path
    dtype: str
    python: Path
    slo_ms: tuple[int, int]
    """TTFT and TPOT at most."""
    offered_rps: float
    quick: bool


def command_of(server: str, conditions: Conditions, port: int) -> list[str]:
    """Return the command line of a server."""
    model, dtype = conditions.model, ["--dtype", conditions.dtype]
    if server == "vllm serve":
        module = "vllm.entrypoints.cli.main"
        flags = [*dtype, "--max-model-len", "4096", "--enforce-eager"]
        flags += ["--served-model-name", model.name]
        cores = sorted(os.sched_getaffinity(0))
        settings = ["VLLM_CPU_KVCACHE_SPACE=2", f"VLLM_CPU_OMP_THREADS_BIND={cores[0]}-{cores[-1]}", "HF_HUB_OFFLINE=1"]
        return [
            "env",
            *settings,
            str(conditions.python),
            "-m",
            module,
            "serve",
            str(model),
            "--port",
            str(port),
            *flags,
        ]
    roles = ["--mixed", "1"] if server == "baton mixed" else ["--prefill", "1", "--decode", "1"]
    flags = ["--port", str(port), "--queue-s", "0", *dtype, *roles]
    return [sys.executable, "-m", "baton.cli.main", "serve", str(model), *flags]


def has_ended(process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    """Wait at most `within_s` for the end of a process. Return whether it has ended."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def running(server: str, conditions: Conditions, port: int) -> Iterator[str]:
    """Start a server, wait until it answers a request, and end it afterwards."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command_of(server, conditions, port), stdout=log, stderr=log)
        url, deadline_s = f"http://127.0.0.1:{port}", time.perf_counter() + START_S
        body = {"model": conditions.model.name, "prompt": "Hello", "max_tokens": 1}
        try:
            while True:
                try:
                    if httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                if has_ended(process, within_s=0.2) or time.perf_counter() > deadline_s:
                    log.seek(0)
                    sys.exit(f"{server} did not start:\n{log.read()[-3000:]}")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def load(conditions: Conditions, url: str, seed: int, *arguments: str) -> dict[str, float]:
    """Run `vllm bench serve` once. Return its figures; rates per second, times in milliseconds."""
    model = conditions.model
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", "HF_HUB_OFFLINE=1", "VLLM_CPU_KVCACHE_SPACE=1", str(conditions.python)]
        command += ["-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model.name, "--seed", str(seed)]
        command += ["--tokenizer", str(model), "--dataset-name", "random", "--ignore-eos"]
        command += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
        ttft_ms, tpot_ms = conditions.slo_ms
        command += ["--goodput", f"ttft:{ttft_ms}", f"tpot:{tpot_ms}"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    return {name: result.get(name) or 0.0 for name in FIGURES}


def measure(conditions: Conditions, url: str, seed: int) -> dict[str, dict[str, float]]:
    """Put both loads on a server."""
    figures = {}
    for concurrency in (1, 8, 32):
        requests = max(4, concurrency) if conditions.quick else max(8, 3 * concurrency // 2)
        lengths = ("--random-input-len", "256", "--random-output-len", "64")
        numbers = ("--num-prompts", str(requests), "--max-concurrency", str(concurrency))
        figures[f"concurrency {concurrency}"] = load(conditions, url, seed, *lengths, *numbers)
    lengths = ("--random-input-len", "400", "--random-output-len", "80", "--random-range-ratio", "0.5")
    requests = "10" if conditions.quick else "40"
    arrivals = ("--num-prompts", requests, "--request-rate", str(conditions.offered_rps), "--burstiness", "0.5")
    figures["goodput"] = load(conditions, url, seed, *lengths, *arrivals)
    return figures


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of every figure over the rounds of one server."""
    return {
        part: {name: statistics.median(figures[part][name] for figures in rounds) for name in FIGURES}
        for part in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder of `engines.py --install`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--slo-ms", type=int, nargs=2, default=(1500, 40), metavar=("TTFT", "TPOT"))
    parser.add_argument("--offered-rps", type=float, default=1.5)
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works; writes nothing")
    args = parser.parse_args()
    conditions = Conditions(
        model=write_folder(args.peers / "models" / "bfloat16"),
        dtype=args.dtype,
        python=args.peers / "vllm" / "bin" / "python",
        slo_ms=tuple(args.slo_ms),
        offered_rps=args.offered_rps,
        quick=args.quick,
    )
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {server: [] for server in SERVERS}
    for number in range(args.rounds):
        for server in SERVERS:
            with running(server, conditions, args.port) as url:
                rounds[server].append(measure(conditions, url, seed=number + 1))
            print(number + 1, server, json.dumps(rounds[server][-1]), flush=True)
    if args.quick:
        return
    version = subprocess.run(
        [str(conditions.python), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = {
        "what": f"SmolLM2-135M-Instruct, {args.dtype}, all cores; loads of the script's docstring; medians of rounds",
        "dtype": args.dtype,
        "vllm_cpu": version.stdout.strip(),
        "slo": {"ttft_ms": args.slo_ms[0], "tpot_ms": args.slo_ms[1], "offered_rps": args.offered_rps},
        "rounds": args.rounds,
    }
    record.write("serving-peers", {**figures, **{server: medians(rounds[server]) for server in SERVERS}})


if __name__ == "__main__":
    main()
