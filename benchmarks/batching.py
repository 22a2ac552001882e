"""Batching policies under one load: TTFT and TPOT of a mixed worker with the embedded model.

python benchmarks/batching.py [--rate 2.0] [--requests 40] [--repeats 2]

Every policy gets the same trace: prompts of 100 to 700 tokens, answers of 8 to 120, Poisson arrivals. The policies take
turns; figures are medians over the repeats. The cost of steps is fitted first, on this machine, for the policy that
asks for it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import engine_steps
import record
from serving import bench

from baton.compute.load_engine import load_engine
from baton.compute.models.resolve import resolve_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.serving import serving

TPOT_SLO_S = 0.06
STEP_TOKENS_MAX = 512
POLICIES = {
    "static-batching": {},
    "prefill-first": {},
    "mixed-chunked": {},
    "slo-chunked": {"tpot_s": TPOT_SLO_S},
}
FIGURES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


def fitted() -> dict[str, float]:
    """Return the arguments of `LinearCost` from a few engine steps: the minimum of three of each kind."""
    card = resolve_model("smollm2-135m")
    layout = card.layout(block_tokens=16, dtype="bfloat16")
    engine = load_engine(card, layout, memoryview(bytearray(layout.block_bytes * 320)), dtype="bfloat16", threads=2)
    engine.warm_up()
    tokens = list(range(1, 402))
    steps = {
        "prefill_100": [engine_steps.part(0, tokens[:100], 0, 100, 25)],
        "prefill_400": [engine_steps.part(0, tokens[:400], 0, 400, 25)],
        "decode_1": [engine_steps.part(0, tokens, 400, 1, 26)],
        "decode_8": [engine_steps.part(index, tokens, 400, 1, 26) for index in range(8)],
    }
    best = {name: min(engine_steps.timed(engine, parts) for _ in range(3)) for name, parts in steps.items()}
    decode_request_s = (best["decode_8"] - best["decode_1"]) / 7
    return {
        "step_overhead_s": max(0.0, best["decode_1"] - decode_request_s),
        "prefill_token_s": (best["prefill_400"] - best["prefill_100"]) / 300,
        "decode_request_s": decode_request_s,
        "context_token_s": 0.0,
    }


def trace(path: Path, *, rate_rps: float, requests: int) -> None:
    """Write a trace in Mooncake's format, in which prompts share no blocks."""
    rng = random.Random(0)
    at_s, lines = 0.0, []
    for index in range(requests):
        at_s += rng.expovariate(rate_rps)
        tokens = rng.randrange(100, 700)
        hashes = [1000 * index + part for part in range(-(-tokens // 512))]
        length = rng.randrange(8, 120)
        lines.append(
            {"timestamp": int(at_s * 1000), "input_length": tokens, "output_length": length, "hash_ids": hashes}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def configuration(policy: str, cost: dict[str, float]) -> str:
    options = ", ".join(f"{key} = {value}" for key, value in POLICIES[policy].items())
    prices = "\n".join(f"{key} = {value:.9f}" for key, value in cost.items())
    return (
        f'[policy.batching]\nuse = "{policy}"\noptions = {{ {options} }}\n'
        f"[batch]\nstep_tokens_max = {STEP_TOKENS_MAX}\n[cost]\n{prices}\n"
    )


def run(policy: str, folder: Path, cost: dict[str, float], seed: int) -> dict[str, Any]:
    config = folder / f"{policy}.toml"
    config.write_text(configuration(policy, cost))
    with serving("--mixed", "1", "--dtype", "bfloat16", "--config", str(config)) as server:
        result = bench(server, "--trace", str(folder / "trace.jsonl"), "--seed", str(seed), "--ignore-eos")
        return {name: result[name] for name in (*FIGURES, "output_tokens_per_s", "completed", "duration_s")}


def middle(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over the repeats."""
    shown: dict[str, Any] = {
        name: {at: statistics.median(result[name][at] for result in results) for at in ("p50", "p90", "p99")}
        for name in FIGURES
    }
    shown["output_tokens_per_s"] = statistics.median(result["output_tokens_per_s"] for result in results)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    cost = fitted()
    results: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace(folder / "trace.jsonl", rate_rps=arguments.rate, requests=arguments.requests)
        for seed in range(arguments.repeats):
            for policy, found in results.items():
                found.append(run(policy, folder, cost, seed))
    figures = {policy: middle(found) for policy, found in results.items()}
    settings = {"rate_rps": arguments.rate, "requests": arguments.requests, "tpot_slo_s": TPOT_SLO_S, "cost": cost}
    record.write("batching", {**settings, "policies": figures, "runs": results})


if __name__ == "__main__":
    main()
