"""Compare topologies of Baton, and `vllm serve`, through HTTP with the same load: latency over load, and goodput.

python benchmarks/comparison.py [--vllm EXE --model FOLDER] [--quick]

Every server runs alone, on all cores, in bfloat16 with the weights of SmolLM2-135M-Instruct. EXE is `vllm` of an
environment with vLLM's CPU build; FOLDER has the weights in safetensors (benchmarks/engines.py writes it below --work).
Writes benchmarks/results/serving-comparison.json, from which the table of README.md is made (`make docs`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import serving

VLLM_PORT, START_S = 8018, 600
LOAD = ("--input-tokens", "256", "--output-tokens", "64")
CONCURRENCIES = (1, 8, 32)
WHAT = "SmolLM2-135M-Instruct, bfloat16, 256 tokens in, 64 out, through HTTP"
TTFT_SLO_S, TPOT_SLO_S = 1.5, 0.04
GOODPUT_WHAT = "TTFT 1.5 s and TPOT 40 ms, 400 tokens in +-50 %, 80 out, bursty, 1.5 requests/s offered"
GOODPUT_LOAD = """
requests = {requests}
input_tokens = {{ kind = "uniform", low = 200, high = 600 }}
output_tokens = 80
arrivals = {{ kind = "gamma", rate_rps = 1.5, cv = 2 }}
"""


def bench(url: str, *arguments: str) -> dict[str, Any]:
    """Run `baton bench` against a server and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", "baton.cli.main", "bench", "--url", url, "--json", str(path), *arguments]
        subprocess.run([*command, "--attainment-min", "0"], check=True, capture_output=True)
        return json.loads(path.read_text())


def measure(url: str, *, quick: bool) -> dict[str, Any]:
    """Return latencies at each concurrency, and the goodput of a bursty load of prompts that no cache has."""
    load = {}
    for seed, concurrency in enumerate(CONCURRENCIES, 1):
        requests = max(4 if quick else 24, (1 if quick else 3) * concurrency)
        result = bench(url, *LOAD, "--concurrency", str(concurrency), "--requests", str(requests), "--seed", str(seed))
        kept = ("ttft_s", "tpot_s", "itl_s", "output_tokens_per_s", "requests", "completed")
        load[str(concurrency)] = {key: result[key] for key in kept}
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(GOODPUT_LOAD.format(requests=15 if quick else 120))
        file.flush()
        targets = ("--ttft-slo-s", str(TTFT_SLO_S), "--tpot-slo-s", str(TPOT_SLO_S))
        result = bench(url, "--trace", file.name, "--seed", "9", *targets)
    goodput = {"goodput_rps": result["goodput_rps"], "attainment_ratio": result["slo"]["attainment_ratio"]}
    return {"load": load, "goodput": goodput}


@contextmanager
def vllm_serving(executable: str, model: str) -> Iterator[str]:
    """Start `vllm serve` and yield its URL when it is ready."""
    url = f"http://127.0.0.1:{VLLM_PORT}"
    command = [executable, "serve", model, "--dtype", "bfloat16", "--port", str(VLLM_PORT), "--max-model-len", "2048"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=START_S), timeout=START_S) as client:
                while client.get(f"{url}/health").status_code != httpx.codes.OK and process.poll() is None:
                    pass
            yield url
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="EXE", help="the `vllm` command of another environment")
    parser.add_argument("--model", metavar="FOLDER", help="with --vllm: the weights in safetensors")
    parser.add_argument("--quick", action="store_true", help="fewer requests: to see that it works")
    args = parser.parse_args()
    servers: dict[str, Any] = {}
    for name, roles in (("1 prefill + 1 decode", ()), ("1 mixed", ("--mixed", "1"))):
        with serving("--dtype", "bfloat16", *roles) as server:
            servers[name] = measure(server.url, quick=args.quick)
    if args.vllm:
        with vllm_serving(args.vllm, args.model) as url:
            servers["vllm serve"] = measure(url, quick=args.quick)
    record.write("serving-comparison", {"what": WHAT, "goodput_what": GOODPUT_WHAT, "servers": servers})


if __name__ == "__main__":
    main()
