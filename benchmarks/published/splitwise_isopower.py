"""Splitwise's iso-power clusters (ISCA 2024) for conversations: the highest rate within its nine SLOs.

    python benchmarks/published/splitwise_isopower.py [--cluster NAME ...] [--corrected] [--span-s S]

The SLOs are slow-downs against an uncontended request on a DGX-A100: TTFT p50/p90/p99 below 2/3/6, TPOT and E2E below
1.25/1.5/5. Published: AA 2.15 times Baseline-A100; HA 1.18 times Baseline-H100. The artefact, run by us: 50, 110, 110,
120, 140 and 140 requests/s. `--corrected` prices decode steps by what was measured, not by the artefact's look-up.
Writes benchmarks/results/published-splitwise-isopower[-corrected].json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store

from baton.core.ports import CostModel
from baton.core.types import StepShape
from baton.metrics.summary import RequestRecord
from baton.policy.named import NAMED
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, SimKind, read_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.load import read_trace
from baton.workload.request import Trace
from baton.workload.schedule import with_arrivals

ARTEFACT_RPS = {"baseline-a100": 50, "baseline-h100": 110, "aa": 110, "hh": 120, "ha": 140, "hhcap": 140}
LIMITS = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
STEP_RPS = 10


def corrected(spec: ClusterSpec) -> ClusterSpec:
    """Price steps by the measured table instead of the artefact's look-up."""

    def table(kind: SimKind) -> SimKind:
        cost: dict[str, Any] = {**kind.cost, "model": "table", "profile": "splitwise"}
        return replace(kind, cost=cost)

    return replace(spec, kinds={name: table(kind) for name, kind in spec.kinds.items()})


def slow_downs(record: RequestRecord, alone: CostModel) -> dict[str, float]:
    """Compare a request with itself on an idle DGX-A100."""
    ttft_s = alone.prefill_s(new_tokens=record.input_tokens, cached_tokens=0)
    steps = record.output_tokens - 1
    tpot_s = alone.step_s(StepShape(decode_requests=1, context_tokens=record.input_tokens))
    values = {"ttft": (record.ttft_s or 0.0) / ttft_s, "e2e": (record.e2e_s or 0.0) / (ttft_s + steps * tpot_s)}
    if steps:
        values["tpot"] = (record.tpot_s or 0.0) / tpot_s
    return values


def worst_share(records: Sequence[RequestRecord], alone: CostModel) -> tuple[float, str]:
    """Return the most strained of the nine SLOs, as a share of its limit; above 1 it is missed."""
    seen: dict[str, list[float]] = {name: [] for name in LIMITS}
    for record in records:
        for name, value in slow_downs(record, alone).items():
            seen[name].append(value)
    shares = {
        f"{name} p{quantile * 100:.0f}": float(np.quantile(seen[name], quantile)) / limit
        for name, limits in LIMITS.items()
        for quantile, limit in zip((0.5, 0.9, 0.99), limits, strict=True)
    }
    worst = max(shares, key=lambda name: shares[name])
    return shares[worst], worst


def load(rate_rps: float, span_s: float) -> Trace:
    trace = read_trace(TRACES / "azure2023" / "conv.first80.csv.gz", limit=round(rate_rps * span_s))
    return with_arrivals(trace, PoissonArrivals(rate_rps), Random(0))


def capacity_rps(name: str, spec: ClusterSpec, alone: CostModel, span_s: float) -> int:
    """Find the highest multiple of 10 requests/s within all SLOs, from the artefact's figure up or down."""
    policy = NAMED["sarathi" if name.startswith("baseline") else "splitwise"]

    def holds(rate_rps: int) -> bool:
        records = replay_trace(spec, load(rate_rps, span_s), policy=policy, seed=0)
        share, worst = worst_share(records, alone)
        print(f"  {name:14} {rate_rps:4} requests/s: {worst} at {share:.2f} of its limit", flush=True)
        return share < 1.0

    rate_rps = ARTEFACT_RPS[name]
    if holds(rate_rps):
        while holds(rate_rps + STEP_RPS):
            rate_rps += STEP_RPS
        return rate_rps
    while rate_rps > STEP_RPS and not holds(rate_rps - STEP_RPS):
        rate_rps -= STEP_RPS
    return rate_rps - STEP_RPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="append", choices=list(ARTEFACT_RPS))
    parser.add_argument("--corrected", action="store_true")
    parser.add_argument("--span-s", type=float, default=30.0)
    args = parser.parse_args()
    found: dict[str, int] = {}
    base = read_spec(CLUSTERS / "splitwise-isopower-baseline-a100.yaml")
    alone = (corrected(base) if args.corrected else base).cost_model().on("a100")
    for name in args.cluster or ARTEFACT_RPS:
        spec = read_spec(CLUSTERS / f"splitwise-isopower-{name}.yaml")
        found[name] = capacity_rps(name, corrected(spec) if args.corrected else spec, alone, args.span_s)
        print(f"{name:14} {found[name]} requests/s, the artefact {ARTEFACT_RPS[name]}", flush=True)
    store(
        "splitwise-isopower" + ("-corrected" if args.corrected else ""),
        {
            "span_s": args.span_s,
            "artefact_rps": {name: ARTEFACT_RPS[name] for name in found},
            "simulated_rps": found,
            "published_ratios": {"aa over baseline-a100": 2.15, "ha over baseline-h100": 1.18},
        },
    )


if __name__ == "__main__":
    main()
