"""Predicted against actual TTFT and TPOT of the default policy, over clusters and loads. No GPU is needed.

    python benchmarks/predictions.py [--half tuned|held-out] [--case NAME] [--policy FILE] [--table]

Plays every case in the simulator and compares what routing predicted for each admitted request with what happened.
Each case has an SLO attainment beside it, because refusals select the requests whose predictions count. Cases of the
half `tuned` may be looked at while the predictor is changed; `held-out` ones are played for the report only. Writes
benchmarks/results/predictions.json; --table plays nothing and prints the file as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from record import RESULTS, environment, table, write

from baton.core.config import Topology
from baton.core.types import Slo
from baton.lab.report.prediction_table import Accuracy, PredictionRatios, accuracy
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.request import Trace, TraceRequest

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples" / "clusters"
NAME = "predictions"
AIMS = {"error_p50": 0.15, "error_p90": 0.35}
Half = Literal["tuned", "held-out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cluster with lognormal lengths at Poisson times, played at several rates."""

    name: str
    half: Half
    cluster: Path
    slo: Slo
    input_tokens: int
    output_tokens: int
    rates_rps: tuple[float, ...]
    """About 0.6, 0.9 and 1.2 of what the cluster carries within the SLO."""
    topology: Topology | None = None
    """Replaces the cluster's own."""
    requests: int = 400

    def spec(self) -> ClusterSpec:
        spec = read_spec(self.cluster)
        spec = replace(spec, queue_requests_max=100_000, output_tokens_max=4096)
        return spec if self.topology is None else replace(spec, topology=self.topology)

    def trace(self, rate_rps: float) -> Trace:
        """Return requests with lognormal lengths of the given means (sigma 0.6), drawn with a fixed seed."""
        draw, at_s, requests = Random(7), 0.0, list[TraceRequest]()
        for _ in range(self.requests):
            at_s += draw.expovariate(rate_rps)
            lengths = [
                max(4, min(6 * mean, round(mean * draw.lognormvariate(-0.18, 0.6))))
                for mean in (self.input_tokens, self.output_tokens)
            ]
            requests.append(TraceRequest(at_s=at_s, input_tokens=lengths[0], output_tokens=lengths[1]))
        return Trace(format="made", timing="absolute", requests=tuple(requests))


def case(name: str, half: Half, file: str, slo: tuple[float, float], lengths: tuple[int, int], *rates: float,
         topology: Topology | None = None) -> Case:  # fmt: skip
    folder = EXAMPLES if (EXAMPLES / file).exists() else HERE / "clusters"
    return Case(
        name=name, half=half, cluster=folder / file, slo=Slo(ttft_s=slo[0], tpot_s=slo[1]),
        input_tokens=lengths[0], output_tokens=lengths[1], rates_rps=rates, topology=topology,
    )  # fmt: skip


OWN = "one-gpu-host.toml"
CASES = (
    case("own-2p2d", "tuned", OWN, (1.0, 0.03), (1024, 200), 20, 30, 40),
    case("own-4-mixed", "tuned", OWN, (1.0, 0.03), (1024, 200), 15, 25, 35, topology=Topology(mixed=4)),
    case("distserve-4xa100", "tuned", "distserve-13b-4xa100-optimum.yaml", (0.2, 0.1), (755, 200), 2.5, 4, 6),
    case("70b-3p1d", "tuned", "llama70b-3p1d-a100-tp8.yaml", (0.5, 0.03), (3000, 300), 2.5, 3.4, 4.6),
    case("70b-2-mixed", "tuned", "dynamo-llama70b-8xh100-mixed.yaml", (3.0, 0.04), (3000, 150), 1.5, 2.5, 3.5),
    case("own-3p1d", "held-out", OWN, (0.5, 0.02), (2000, 100), 15, 22, 30, topology=Topology(prefill=3, decode=1)),
    case("distserve-2p1d", "held-out", "distserve-13b-2p1d.yaml", (0.4, 0.04), (512, 64), 6, 9, 12),
    case("arrow-8b", "held-out", "arrow-llama8b-8xh800.yaml", (1.0, 0.05), (2000, 200), 40, 60, 80),
    case("yi-34b-mixed", "held-out", "sarathi-yi34b-2xa100.yaml", (3.0, 0.1), (1500, 200), 0.6, 0.9, 1.2),
    case("dynamo-disagg", "held-out", "dynamo-llama70b-8xh100-disagg.yaml", (3.0, 0.03), (3000, 150), 1.5, 2.5, 3.5),
)


def play(case: Case, policy: str) -> Iterator[dict[str, Any]]:
    """Yield one row per rate: the accuracy of both predictions and the share of requests in SLO."""
    spec = case.spec()
    for rate_rps in case.rates_rps:
        ratios = PredictionRatios()
        records = replay_trace(spec, case.trace(rate_rps), policy=policy, seed=0, slo=case.slo, tap=ratios.take)
        results = summarize(records, slo=SloTargets(ttft_s=case.slo.ttft_s, tpot_s=case.slo.tpot_s), wall_s=0.0)
        found = {"ttft": accuracy(ratios.ttft), "tpot": accuracy(ratios.tpot)}
        yield {
            "rate_rps": rate_rps,
            "requests": results.requests,
            "rejected": results.rejected,
            "attainment_ratio": round(results.slo.attainment_ratio or 0.0, 4),
            **{name: _rounded(each) for name, each in found.items()},
            "commit": environment()["commit"],
        }


def _rounded(found: Accuracy | None) -> dict[str, float] | None:
    return None if found is None else {key: round(value, 3) for key, value in msgspec.to_builtins(found).items()}


def report(cases: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of every case, at each of its rates, and how many rows of each half are within the aims."""
    rows: list[list[str]] = []
    for name, found in cases.items():
        rates = found["rates"]
        errors = [
            "/".join(f"{row[latency][key]:.0%}" if row[latency] else "-" for row in rates)
            for latency in ("ttft", "tpot")
            for key in AIMS
        ]
        rates_rps = "/".join(f"{row['rate_rps']:g}" for row in rates)
        rows.append(
            [name, found["half"], rates_rps, "/".join(f"{row['attainment_ratio']:.3f}" for row in rates), *errors]
        )
    summaries: list[str] = []
    for half, latency in product(("tuned", "held-out"), ("ttft", "tpot")):
        each = [row[latency] for found in cases.values() if found["half"] == half for row in found["rates"]]
        kept = [errors for errors in each if errors]
        if kept:
            within = sum(all(errors[key] <= aim for key, aim in AIMS.items()) for errors in kept)
            middle = " and ".join(f"{median(errors[key] for errors in kept):.1%}" for key in AIMS)
            summaries.append(
                f"{half}, {latency.upper()}: median {middle}; {within} of {len(kept)} rows within the aims"
            )
    head = ["Case", "half", "req/s", "in SLO", "TTFT error p50", "p90", "TPOT error p50", "p90"]
    return {"head": head, "lines": rows, "summaries": summaries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tuned", "held-out"))
    parser.add_argument("--case", action="append", choices=[each.name for each in CASES])
    parser.add_argument("--policy", default="baton")
    parser.add_argument("--table", action="store_true", help="print the result file as a table, and play nothing")
    args = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    found: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for each in () if args.table else CASES:
        if each.name in (args.case or [each.name]) and args.half in (None, each.half):
            slo = {"ttft_s": each.slo.ttft_s, "tpot_s": each.slo.tpot_s}
            lengths = {"input_tokens": each.input_tokens, "output_tokens": each.output_tokens}
            found[each.name] = {"half": each.half, "slo": slo, **lengths, "rates": list(play(each, args.policy))}
    ordered = {each.name: found[each.name] for each in CASES if each.name in found}
    made = report(ordered)
    if not args.table:
        write(NAME, {"report": made, "cases": ordered})
    print(table(made["head"], made["lines"]), *made["summaries"], sep="\n")


if __name__ == "__main__":
    main()
