"""Compare Baton apart (1P1D), Baton mixed, and `vllm serve` through HTTP, with vLLM's own load generator.

    python benchmarks/engines.py --install FOLDER       installs vLLM's CPU build into FOLDER/vllm
    python benchmarks/serving_peers.py --peers FOLDER [--rounds 3] [--quick]

All three serve the same bfloat16 weights of SmolLM2-135M-Instruct on all cores. `vllm bench serve` sends the load, so
no figure is measured by Baton's own client. The servers run one after the other, in turns for several rounds: a figure
is the median of its rounds. Two loads:

- closed: 256 tokens in, 64 out, at concurrency 1, 8 and 32;
- goodput: 400 +-50 % tokens in, 80 out, bursty arrivals (burstiness 0.5) at 1.5 requests/s; a request counts when its
  TTFT is at most 1.5 s and its TPOT at most 40 ms.

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
from pathlib import Path
from typing import Any

import httpx
import record
from peers.models import write_folder

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
TTFT_SLO_MS, TPOT_SLO_MS = 1500, 40
OFFERED_RPS = 1.5
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


def command_of(server: str, model: Path, python: Path, port: int) -> list[str]:
    """Return the command line of a server."""
    if server == "vllm serve":
        module = "vllm.entrypoints.cli.main"
        flags = ["--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager"]
        flags += ["--served-model-name", model.name]
        cores = sorted(os.sched_getaffinity(0))
        settings = ["VLLM_CPU_KVCACHE_SPACE=2", f"VLLM_CPU_OMP_THREADS_BIND={cores[0]}-{cores[-1]}", "HF_HUB_OFFLINE=1"]
        return ["env", *settings, str(python), "-m", module, "serve", str(model), "--port", str(port), *flags]
    roles = ["--mixed", "1"] if server == "baton mixed" else ["--prefill", "1", "--decode", "1"]
    return [sys.executable, "-m", "baton.cli.main", "serve", str(model), "--port", str(port), "--queue-s", "0", *roles]


def has_ended(process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    """Wait at most `within_s` for the end of a process. Return whether it has ended."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


@contextmanager
def running(server: str, model: Path, python: Path, port: int) -> Iterator[str]:
    """Start a server, wait until it answers a request, and end it afterwards."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command_of(server, model, python, port), stdout=log, stderr=log)
        url, deadline_s = f"http://127.0.0.1:{port}", time.perf_counter() + START_S
        body = {"model": model.name, "prompt": "Hello", "max_tokens": 1}
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


def load(python: Path, model: Path, url: str, seed: int, *arguments: str) -> dict[str, float]:
    """Run `vllm bench serve` once. Return its figures; rates per second, times in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["env", "HF_HUB_OFFLINE=1", "VLLM_CPU_KVCACHE_SPACE=1", str(python)]
        command += ["-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", url, "--endpoint", "/v1/completions", "--model", model.name, "--seed", str(seed)]
        command += [
            "--tokenizer",
            str(model),
            "--dataset-name",
            "random",
            "--ignore-eos",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
        ]
        command += ["--goodput", f"ttft:{TTFT_SLO_MS}", f"tpot:{TPOT_SLO_MS}"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    return {name: result.get(name) or 0.0 for name in FIGURES}


def measure(url: str, model: Path, python: Path, seed: int, *, quick: bool) -> dict[str, dict[str, float]]:
    """Put both loads on a server."""
    figures = {}
    for concurrency in (1, 8, 32):
        requests = max(4, concurrency) if quick else max(12, 3 * concurrency)
        figures[f"concurrency {concurrency}"] = load(
            python,
            model,
            url,
            seed,
            *("--random-input-len", "256", "--random-output-len", "64"),
            *("--num-prompts", str(requests), "--max-concurrency", str(concurrency)),
        )
    figures["goodput"] = load(
        python,
        model,
        url,
        seed,
        *("--random-input-len", "400", "--random-output-len", "80", "--random-range-ratio", "0.5"),
        *("--num-prompts", "10" if quick else "60", "--request-rate", str(OFFERED_RPS), "--burstiness", "0.5"),
    )
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
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works; writes nothing")
    args = parser.parse_args()
    python = args.peers / "vllm" / "bin" / "python"
    model = write_folder(args.peers / "models" / "bfloat16")
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {server: [] for server in SERVERS}
    for number in range(args.rounds):
        for server in SERVERS:
            with running(server, model, python, args.port) as url:
                rounds[server].append(measure(url, model, python, seed=number + 1, quick=args.quick))
            print(number + 1, server, json.dumps(rounds[server][-1]), flush=True)
    if args.quick:
        return
    version = subprocess.run(
        [str(python), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = {
        "what": "SmolLM2-135M-Instruct, bfloat16, all cores; loads as in the script's docstring; medians of rounds",
        "vllm_cpu": version.stdout.strip(),
        "slo": {"ttft_ms": TTFT_SLO_MS, "tpot_ms": TPOT_SLO_MS, "offered_rps": OFFERED_RPS},
        "rounds": args.rounds,
    }
    record.write("serving-peers", {**figures, **{server: medians(rounds[server]) for server in SERVERS}})


if __name__ == "__main__":
    main()
