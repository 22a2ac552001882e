"""The simulator against vLLM 0.19: 300 real requests on each of four set-ups, timed by LLMServingSim's authors.

    python benchmarks/validation_vllm.py [--setup NAME ...] [--profile FILE]

The prices of a step (of itself, per token in bands, per attention pair and token of context) and the time that a
request takes to the engine are fitted to every other request, through the simulator: least squares of the relative
errors of their TTFT and TPOT. The error is told of the others, which the fit has not seen; and once more with the
prices fitted to the first half in time, told of the second. Block size, limits of a step and KV room are those of the
runs; requests arrive when they did, with the prefixes that they shared. Two data-parallel ranks with shared experts
step together, and are simulated as one engine of twice the size.
Writes benchmarks/results/validation-vllm.json.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import record
from scipy.optimize import least_squares

from baton.core.config import BatchLimits
from baton.decide.cost.fitted import FittedCost, save_fitted
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, SimKind, SimKV, SimLink, SimWorkers
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace, TraceRequest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
PRICES = ("start_s", "token_to_32_s", "token_to_128_s", "token_above_s", "pair_s", "context_token_s", "link_s")
"""What is fitted: prices of `FittedCost`, whose bands of tokens are tied to three, and the time of a message."""
STEP_TOKENS_MAX, REQUESTS_MAX, BLOCK_TOKENS = 2048, 128, 16
TTFT_FLOOR_S = 0.1
"""Added to a measured TTFT before an error is divided by it: a wait of 20 ms counts less than one of a second."""
EVALUATIONS_MAX = 7
"""Steps of a fit; each costs a simulation per price."""
QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine that was measured."""

    name: str
    hardware: str
    model: str
    trace: str
    """The same requests with their prefixes: the first 240 of them."""
    start: tuple[float, ...]
    """Prices to start the fit from, and the seconds to the engine."""
    kv_blocks: int = 100_000
    """More than 128 requests need, where the run does not say."""
    ranks: int = 1
    """Data-parallel engines that step together."""


def _start(step_s: float, small_s: float, large_s: float) -> tuple[float, ...]:
    """Prices to begin with: of a step, of a token among few, of one among many."""
    return (step_s, small_s, small_s, large_s, 1e-9, 8e-8, 0.002)


LLAMA, QWEN = "llama31_8b.first240.jsonl.gz", "qwen3.first240.jsonl.gz"
MOE = "Qwen3-30B-A3B-Instruct-2507"
MOE_START = (0.019, 2.8e-4, 8.5e-5, 2.5e-5, 1e-9, 2.4e-8, 0.004)
"""Few tokens use few experts: the first ones cost most."""
SETUPS = (
    Setup("rtx4090-llama-8b", "RTX4090", "Llama-3.1-8B", LLAMA, _start(0.018, 1e-4, 8e-5), 2588),
    Setup("rtxpro6000-llama-8b", "RTXPRO6000", "Llama-3.1-8B", LLAMA, _start(0.012, 5e-5, 4e-5)),
    Setup("rtxpro6000-qwen3-32b-tp2", "RTXPRO6000", "Qwen3-32B", QWEN, _start(0.03, 1e-4, 1.6e-4)),
    Setup("rtxpro6000-qwen3-30b-a3b-dp2", "RTXPRO6000", MOE, QWEN, MOE_START, ranks=2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What vLLM did, request by request."""

    trace: Trace
    ttft_s: np.ndarray
    tpot_s: np.ndarray


def read_measured(path: Path, setup: Setup) -> Measured:
    """Read a set-up's requests; the zero of arrivals is moved to where the engine's is."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if (row["hardware"], row["model"]) == (setup.hardware, setup.model)]
    offset_s = min(float(row["queued_s"]) - float(row["arrival_s"]) for row in rows)
    shared = read_trace(SHARED / "traces" / "sharegpt300" / setup.trace).requests
    requests: list[TraceRequest] = []
    for index, row in enumerate(rows):
        same = shared[index] if index < len(shared) else None
        if same is not None and same.input_tokens != int(row["input_tokens"]):
            raise SystemExit(
                f"{setup.name}: request {index} has {row['input_tokens']} input tokens in the profile and "
                f"{same.input_tokens} in {setup.trace}; the two files are not of the same requests"
            )
        requests.append(
            TraceRequest(
                at_s=max(0.0, float(row["arrival_s"]) + offset_s),
                input_tokens=int(row["input_tokens"]),
                output_tokens=int(row["output_tokens"]),
                prefix_ids=same.prefix_ids if same is not None else (),
                prefix_block_tokens=same.prefix_block_tokens if same is not None else 0,
            )
        )
    first = np.array([float(row["first_token_s"]) for row in rows])
    last = np.array([float(row["last_token_s"]) for row in rows])
    steps = np.array([int(row["output_tokens"]) - 1 for row in rows])
    arrival = np.array([request.at_s for request in requests])
    trace = Trace(format="llmservingsim", timing="absolute", requests=tuple(requests))
    return Measured(trace, first - arrival, (last - first) / steps)


def cluster(setup: Setup, values: Sequence[float], folder: Path) -> ClusterSpec:
    """Describe the engine with these prices."""
    start_s, few_s, some_s, many_s, pair_s, context_s, link_s = (float(value) for value in values)
    cost = FittedCost(
        start_s=start_s, band_s=(few_s, few_s, some_s, many_s, many_s), sequence_s=0.0, decode_s=0.0,
        pair_s=pair_s, context_token_s=context_s,
    )  # fmt: skip
    file = folder / "cost.json"
    file.write_text(save_fitted(cost))
    kv = SimKV(blocks=setup.kv_blocks, block_tokens=BLOCK_TOKENS)
    return ClusterSpec(
        workers=(SimWorkers(role="mixed", kind="gpu"),),
        kinds={"gpu": SimKind(cost={"model": "fitted", "file": str(file)}, kv=kv)},
        kv=kv,
        batch=BatchLimits(
            step_tokens_max=STEP_TOKENS_MAX * setup.ranks,
            requests_max=REQUESTS_MAX * setup.ranks,
            growth_tokens=BLOCK_TOKENS,
        ),
        link=SimLink(delay_min_s=link_s, delay_max_s=link_s),
        queue_requests_max=100_000,
        output_tokens_max=4096,
    )


def simulate(setup: Setup, measured: Measured, values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return TTFT and TPOT of every request, in the trace's order."""
    with tempfile.TemporaryDirectory() as folder:
        records = replay_trace(cluster(setup, values, Path(folder)), measured.trace, policy="sarathi", seed=0)
    ordered = sorted(records, key=lambda record: record.arrival_s)
    return np.array([_known(record.ttft_s, record) for record in ordered]), np.array(
        [_known(record.tpot_s, record) for record in ordered]
    )


def _known(value: float | None, record: RequestRecord) -> float:
    if value is None:
        raise SystemExit(f"a simulated request with {record.input_tokens} input tokens ended as {record.outcome}")
    return value


def fit(setup: Setup, measured: Measured, seen: np.ndarray, start: Sequence[float]) -> np.ndarray:
    """Find the prices; their logarithms are what is searched, so that none gets negative."""

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        ttft_s, tpot_s = simulate(setup, measured, np.exp(logarithms))
        late = (ttft_s - measured.ttft_s) / (measured.ttft_s + TTFT_FLOOR_S)
        slow = tpot_s / measured.tpot_s - 1
        return np.concatenate((late[seen], 2.0 * slow[seen]))

    begin = np.log(np.array(start))
    found = least_squares(residuals, begin, diff_step=0.01, loss="soft_l1", f_scale=0.1, max_nfev=EVALUATIONS_MAX)
    return np.exp(found.x)


def errors(simulated: np.ndarray, real: np.ndarray) -> dict[str, float]:
    """Relative error of the mean and of quantiles, and the mean error of single requests."""
    found = {"mean": simulated.mean() / real.mean() - 1}
    for quantile in QUANTILES:
        found[f"p{quantile}"] = np.percentile(simulated, quantile) / np.percentile(real, quantile) - 1
    return {name: round(float(value), 4) for name, value in found.items()}


def validate(setup: Setup, profile: Path) -> dict[str, object]:
    measured = read_measured(profile, setup)
    count = len(measured.ttft_s)
    parts = {"every other request": np.arange(count) % 2 == 0, "first half in time": np.arange(count) < count // 2}
    figures: dict[str, object] = {}
    values: Sequence[float] = setup.start
    for name, seen in parts.items():
        values = fit(setup, measured, seen, values)
        ttft_s, tpot_s = simulate(setup, measured, values)
        held = ~seen
        figures[f"fitted to {name}"] = {
            "prices": {price: float(f"{value:.4g}") for price, value in zip(PRICES, values, strict=True)},
            "held_out_requests": int(held.sum()),
            "ttft_mean_s": {"vllm": float(measured.ttft_s[held].mean()), "simulated": float(ttft_s[held].mean())},
            "tpot_mean_s": {"vllm": float(measured.tpot_s[held].mean()), "simulated": float(tpot_s[held].mean())},
            "ttft_error": errors(ttft_s[held], measured.ttft_s[held]),
            "tpot_error": errors(tpot_s[held], measured.tpot_s[held]),
        }
        print(f"{setup.name:30} {name:20} TTFT {errors(ttft_s[held], measured.ttft_s[held])}", flush=True)
        print(f"{'':51} TPOT {errors(tpot_s[held], measured.tpot_s[held])}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setup.name for setup in SETUPS]
    parser.add_argument(
        "--setup", action="append", choices=names, help="these only, beside what the file has of others"
    )
    parser.add_argument("--profile", type=Path, default=SHARED / "profiles" / "llmservingsim" / "vllm_requests.csv.gz")
    parser.add_argument("--name", default="validation-vllm", help="of the result file")
    args = parser.parse_args()
    chosen = [setup for setup in SETUPS if not args.setup or setup.name in args.setup]
    stored = record.RESULTS / f"{args.name}.json"
    figures: dict[str, object] = json.loads(stored.read_text())["setups"] if args.setup and stored.exists() else {}
    for setup in chosen:
        figures[setup.name] = validate(setup, args.profile)
        record.write(args.name, {"setups": figures})


if __name__ == "__main__":
    main()
