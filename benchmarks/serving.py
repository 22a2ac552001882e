"""The figures of the whole server on the embedded model: latency over load, handoff, start, and what the server adds.

python benchmarks/serving.py [--quick]                                         serving.json
python benchmarks/serving.py --against SRC [--rounds N] [--quick]              serving-against.json

Each figure is a median; what is compared with each other is measured interleaved in this one run. With `--against`,
the `src` folder of another version of this repository serves the same loads by turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import record

from baton.compute.load_engine import load_engine
from baton.compute.models.resolve import resolve_model
from baton.core.step import Slice, Step
from baton.core.types import BlockId, RequestId, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import FLAGS, RunningServer, serving

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
SRC = Path(__file__).resolve().parents[1] / "src"


def bench(server: RunningServer, *arguments: str) -> dict[str, Any]:
    """Run `baton bench` against the server and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [
            sys.executable,
            "-m",
            "baton.cli.main",
            "bench",
            "--url",
            server.url,
            "--json",
            str(path),
            *arguments,
        ]
        subprocess.run(command, check=True, capture_output=True)
        return json.loads(path.read_text())


def load_curve(server: RunningServer, *, requests: int) -> dict[str, Any]:
    """TTFT, TPOT and output rate at concurrency 1, 8 and 32; 128 tokens in, 64 out."""
    curve = {}
    for seed, concurrency in enumerate((1, 8, 32), 1):
        count = max(requests, 2 * concurrency)
        result = bench(
            server,
            *("--concurrency", str(concurrency), "--requests", str(count), "--seed", str(seed)),
            *("--input-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)),
        )
        curve[f"concurrency {concurrency}"] = {
            "ttft_s": result["ttft_s"],
            "tpot_s": result["tpot_s"],
            "output_tokens_per_s": result["output_tokens_per_s"],
            "requests": result["requests"],
        }
    return curve


def prefill_rate(server: RunningServer, tokens: int, *, requests: int) -> dict[str, float]:
    """Prompt tokens per second of one request alone: tokens over TTFT."""
    result = bench(
        server,
        *("--concurrency", "1", "--requests", str(requests), "--seed", str(tokens)),
        *("--input-tokens", str(tokens), "--output-tokens", "1"),
    )
    return {"ttft_s": result["ttft_s"]["p50"], "tokens_per_s": tokens / result["ttft_s"]["p50"]}


class BareLoop:
    """The engine in this process, on one core: what a request costs with no server around it."""

    def __init__(self) -> None:
        card = resolve_model("smollm2-135m")
        layout = card.layout(block_tokens=16, dtype="float32")
        memory = memoryview(bytearray(layout.block_bytes * 32))
        self._engine = load_engine(card, layout, memory, dtype="float32", threads=1)
        self._engine.warm_up()

    def run(self, prompt: list[int]) -> tuple[float, float]:
        """Prefill, then decode greedily. Returns seconds to the first token, and per further token."""
        tokens, table = list(prompt), [BlockId(index) for index in range(32)]
        started = time.perf_counter()
        self._step(tokens, table, 0)
        first = time.perf_counter()
        for _ in range(OUTPUT_TOKENS - 1):
            self._step(tokens, table, len(tokens) - 1)
        return first - started, (time.perf_counter() - first) / (OUTPUT_TOKENS - 1)

    def _step(self, tokens: list[int], table: list[BlockId], start: int) -> None:
        part = Slice(
            request_id=RequestId("bare"),
            tokens=tokens,
            start=start,
            count=len(tokens) - start,
            block_table=table,
            sample=True,
            sampling=Sampling(temperature=0.0),
            prompt_tokens=PROMPT_TOKENS,
        )
        token = self._engine.execute(Step((part,))).slices[0].token
        assert token is not None
        tokens.append(token)


def through_http(server: RunningServer, client: httpx.Client, prompt: list[int]) -> dict[str, float]:
    """One streamed request, timed by its client; with the server's own step times for the same request."""
    steps = {role: _steps(server, role) for role in ("prefill", "decode")}
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    started = time.perf_counter()
    moments, last = [], ""
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                moments.append(time.perf_counter())
                last = line
    timings = json.loads(last[6:])["timings"]
    after = {role: _steps(server, role) for role in ("prefill", "decode")}
    step_s = {role: (after[role][0] - steps[role][0]) / max(1, after[role][1] - steps[role][1]) for role in steps}
    return {
        "ttft_s": moments[0] - started,
        "tpot_s": (moments[-1] - moments[0]) / (OUTPUT_TOKENS - 1),
        "prefill_step_s": step_s["prefill"],
        "decode_step_s": step_s["decode"],
        "handoff_s": timings["handoff_s"],
        "queue_s": timings["queue_s"],
        "server_ttft_s": timings["ttft_s"],
    }


def _steps(server: RunningServer, role: str) -> tuple[float, float]:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if f'role="{role}"' in line}
    return found.get("baton_step_seconds_sum", 0.0), found.get("baton_step_seconds_count", 0.0)


def overhead(server: RunningServer, runs: int) -> dict[str, Any]:
    """Bare loop and server by turns, on the decode worker's core: what Python, HTTP and the hop add."""
    cores = sorted(os.sched_getaffinity(0))
    rng, bare_runs, http_runs = random.Random(7), [], []
    os.sched_setaffinity(0, {cores[-1]})
    bare = BareLoop()
    with server.client() as client:
        for _ in range(runs):
            prompt = [rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
            bare_runs.append(bare.run(prompt))
            os.sched_setaffinity(0, cores)
            http_runs.append(through_http(server, client, prompt))
            os.sched_setaffinity(0, {cores[-1]})
    os.sched_setaffinity(0, cores)
    added_inside = [run["server_ttft_s"] - run["prefill_step_s"] for run in http_runs]
    added_ttft = [run["ttft_s"] - run["prefill_step_s"] for run in http_runs]
    added_tpot = [run["tpot_s"] / run["decode_step_s"] - 1 for run in http_runs]
    return {
        "bare_ttft_s": record.spread([ttft for ttft, _ in bare_runs]),
        "bare_tpot_s": record.spread([tpot for _, tpot in bare_runs]),
        "http_ttft_s": record.spread([run["ttft_s"] for run in http_runs]),
        "http_tpot_s": record.spread([run["tpot_s"] for run in http_runs]),
        "added_to_ttft_over_its_own_step_s": record.spread(added_ttft),
        "of_that_inside_the_server_and_worker_s": record.spread(added_inside),
        "queue_s": record.spread([run["queue_s"] for run in http_runs]),
        "added_to_tpot_over_its_own_steps_ratio": record.spread(added_tpot),
        "tpot_over_bare_loop_ratio": statistics.median(run["tpot_s"] for run in http_runs)
        / statistics.median(tpot for _, tpot in bare_runs),
        "handoff_s": record.spread([run["handoff_s"] for run in http_runs]),
        "decode_step_s": record.spread([run["decode_step_s"] for run in http_runs]),
        "handoff_bytes": server.metric("baton_handoff_bytes_total"),
    }


def against(src: Path, rounds: int, requests: int) -> dict[str, Any]:
    """Put both versions under the same loads by turns; figures are medians over the rounds."""
    # The older version may lack the flag for the longest wait in the queue.
    versions = {"this": (SRC, FLAGS), "against": (src.resolve(), ("--port", "0"))}
    topologies = {"1 prefill + 1 decode": (), "1 mixed": ("--mixed", "1")}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for topology, arguments in topologies.items():
            for version, (path, flags) in versions.items():
                environment = {"PYTHONPATH": str(path)}
                with serving("--dtype", "float32", *arguments, environment=environment, flags=flags) as server:
                    found.setdefault((topology, version), []).append(load_curve(server, requests=requests))
    rows: dict[str, Any] = {}
    for (topology, version), curves in found.items():
        for load in curves[0]:
            figures = {
                "output_tokens_per_s": [curve[load]["output_tokens_per_s"] for curve in curves],
                "ttft_p50_s": [curve[load]["ttft_s"]["p50"] for curve in curves],
                "tpot_p50_s": [curve[load]["tpot_s"]["p50"] for curve in curves],
            }
            rows.setdefault(f"{topology}, {load}", {})[version] = {
                name: record.spread(values) for name, values in figures.items()
            }
    return {"what": "SmolLM2-135M-Instruct, float32, 128 tokens in, 64 out", "rounds": rounds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs: to see that it works")
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another version")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of --against (default: 3)")
    args = parser.parse_args()
    few, many = (2, 2) if args.quick else (5, 12)
    if args.against is not None:
        record.write("serving-against", against(args.against, args.rounds, many))
        return
    figures: dict[str, Any] = {
        "what": "SmolLM2-135M-Instruct, float32, 128 tokens in, 64 out",
    }
    with serving("--dtype", "float32") as server:
        figures["overhead, 1 prefill + 1 decode"] = overhead(server, many)
        figures["load, 1 prefill + 1 decode"] = load_curve(server, requests=many)
        figures["prefill, 1 prefill + 1 decode"] = {
            str(tokens): prefill_rate(server, tokens, requests=few) for tokens in (512, 2048)
        }
    with serving("--dtype", "float32", "--mixed", "1") as server:
        figures["load, 1 mixed"] = load_curve(server, requests=many)
        figures["prefill, 1 mixed"] = {
            str(tokens): prefill_rate(server, tokens, requests=few) for tokens in (512, 2048)
        }
    record.write("serving", figures)


if __name__ == "__main__":
    main()
