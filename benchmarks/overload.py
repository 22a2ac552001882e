"""Overload of a real server, with admission and without: goodput, SLO attainment of the admitted, time of a refusal.

    python benchmarks/overload.py [--quick] [--model MODEL] [--mixed N | --prefill N --decode N]

The capacity is the rate at which the server completes requests with 8 at a time. Then the server gets 0.5, 0.8, 1 and 3
times that rate, and once more 3 times without admission (`admit-all`). The SLO of every request is 8 times the latency
of a request alone. Writes benchmarks/results/overload.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import RunningServer, serving

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
SLO_RATIO = 8.0
SHARES = (0.5, 0.8, 1.0, 3.0)
PROBE_PAUSE_S = 0.25


def bench(server: RunningServer, *arguments: str) -> dict[str, Any]:
    """Run `baton bench` against the server and return its results. Refused requests are no failure here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        lengths = ("--input-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS))
        command = [sys.executable, "-m", "baton.cli.main", "bench", "--url", server.url, "--json", str(path)]
        subprocess.run([*command, *lengths, *arguments], check=False, capture_output=True)
        return json.loads(path.read_text())


def time_refusals(server: RunningServer, until: threading.Event, refusals_s: list[float]) -> None:
    """Send requests beside the load, and record how long each refusal takes."""
    body = {"prompt": "The harbour lies", "max_tokens": 1}
    with server.client() as client:
        while not until.wait(PROBE_PAUSE_S):
            began_s = time.perf_counter()
            if client.post("/v1/completions", json=body).status_code == 503:
                refusals_s.append(time.perf_counter() - began_s)


def overload(
    server: RunningServer, rate_rps: float, duration_s: float, slo: dict[str, float], seed: int
) -> dict[str, Any]:
    """Play one rate, and return its figures."""
    refusals_s: list[float] = []
    ended = threading.Event()
    probe = threading.Thread(target=time_refusals, args=(server, ended, refusals_s))
    probe.start()
    requests = max(8, round(rate_rps * duration_s))
    limits = ("--ttft-slo-s", str(slo["ttft_s"]), "--tpot-slo-s", str(slo["tpot_s"]))
    load = ("--rate", str(rate_rps), "--requests", str(requests), "--seed", str(seed))
    result = bench(server, *load, *limits)
    ended.set()
    probe.join()
    admitted = result["requests"] - result["rejected"]
    in_slo = round((result["slo"]["attainment_ratio"] or 0.0) * result["requests"])
    return {
        "rate_rps": round(rate_rps, 2),
        "requests": result["requests"],
        "rejected": result["rejected"],
        "goodput_rps": round(in_slo / duration_s, 3),
        "admitted_in_slo_ratio": round(in_slo / admitted, 3) if admitted else None,
        "ttft_p50_s": round(result["ttft_s"]["p50"] or 0.0, 3),
        "refusal_p50_s": round(statistics.median(refusals_s), 4) if refusals_s else None,
        "refusal_max_s": round(max(refusals_s), 4) if refusals_s else None,
        "refusals_timed": len(refusals_s),
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="smollm2-135m")
    for role, count in (("mixed", 1), ("prefill", 0), ("decode", 0)):
        parser.add_argument(f"--{role}", type=int, default=count)
    asked = parser.parse_args()
    duration_s = 15.0 if asked.quick else 60.0
    fleet = ["--mixed", str(asked.mixed), "--prefill", str(asked.prefill), "--decode", str(asked.decode)]
    with serving(asked.model, *fleet) as server:
        alone = bench(server, "--concurrency", "1", "--requests", "6", "--seed", "1")
        together = bench(server, "--concurrency", "8", "--requests", "32", "--seed", "2")
    capacity_rps = together["requests_per_s"]
    slo = {"ttft_s": SLO_RATIO * alone["ttft_s"]["p50"], "tpot_s": SLO_RATIO * alone["tpot_s"]["p50"]}
    lines = {"admission": "", "admit-all": '[policy.admission]\nuse = "admit-all"\n'}
    rows: dict[str, Any] = {}
    for name, policy in lines.items():
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "baton.toml"
            config.write_text(f"{policy}[slo]\nttft_s = {slo['ttft_s']}\ntpot_s = {slo['tpot_s']}\n")
            with serving(asked.model, *fleet, "--config", str(config)) as server:
                shares = SHARES if name == "admission" else SHARES[-1:]
                rows[name] = [
                    {"share": share, **overload(server, share * capacity_rps, duration_s, slo, 3 + index)}
                    for index, share in enumerate(shares)
                ]
    results = {"capacity_rps": round(capacity_rps, 3), "slo": slo, "rows": rows}
    print(json.dumps(results, indent=2))
    record.write("overload", results)


if __name__ == "__main__":
    main()
