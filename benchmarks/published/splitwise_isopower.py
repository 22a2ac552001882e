"""Splitwise's iso-power and iso-cost clusters (ISCA 2024) for conversations: the highest rate within its nine SLOs.

    python benchmarks/published/splitwise_isopower.py [--iso power|cost] [--cluster NAME ...] [--corrected]
        [--chunks] [--search] [--span-s S] [--step-rps R] [--name NAME]

The SLOs are slow-downs against an uncontended request on a DGX-A100: TTFT p50/p90/p99 below 2/3/6, TPOT and E2E below
1.25/1.5/5. Published, equal power: AA 2.15 times Baseline-A100; HA 1.18 times Baseline-H100; equal cost: AA 1.4 times
Baseline-H100. The artefact, run by us at equal power: 50, 110, 110, 120, 140 and 140 requests/s. Batches take whole
prompts, as in the artefact; with `--chunks` they are cut as ours are. `--corrected` prices decode steps by what was
measured, not by the artefact's look-up. `--search` looks for the best mix of prompt and token machines instead of
taking the published one. Writes
benchmarks/results/published-splitwise-isoPOWER[-corrected][-chunks][-search][-NAME].json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from msgspec.structs import replace
from outcome import CLUSTERS, TRACES, store
from systems import WHOLE_PROMPTS, with_cost

from baton.core.config import Plugin, PolicyConfig
from baton.core.ports import CostModel
from baton.core.types import StepShape
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.load import read_trace
from baton.lab.workload.request import Trace
from baton.lab.workload.schedule import redraw_arrivals

CLUSTER_NAMES = ("baseline-a100", "baseline-h100", "aa", "hh", "ha", "hhcap")
ARTEFACT_RPS = {"power": dict(zip(CLUSTER_NAMES, (50, 110, 110, 120, 140, 140), strict=True)), "cost": {}}
START_RPS = 100.0
LIMITS = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


def corrected(spec: ClusterSpec) -> ClusterSpec:
    """Price steps by the measured table instead of the artefact's look-up."""
    return with_cost(spec, {"model": "table", "profile": "splitwise"})


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


@cache
def load(rate_rps: float, span_s: float) -> Trace:
    trace = read_trace(TRACES / "azure2023" / "conv.first80.csv.gz", limit=round(rate_rps * span_s))
    return redraw_arrivals(trace, PoissonArrivals(rate_rps), Random(0))


@dataclass(frozen=True, slots=True)
class Search:
    """Finds how much a cluster serves."""

    alone: CostModel
    span_s: float
    step_rps: float
    batching: Plugin

    def policy(self, spec: ClusterSpec) -> PolicyConfig:
        mixed = all(group.role == "mixed" for group in spec.workers)
        return replace(POLICY_SETS["sarathi" if mixed else "splitwise"], batching=self.batching)

    def holds(self, name: str, spec: ClusterSpec, rate_rps: float) -> bool:
        records = replay_trace(spec, load(rate_rps, self.span_s), policy=self.policy(spec), seed=0)
        share, worst = worst_share(records, self.alone)
        print(f"  {name:14} {rate_rps:4.0f} requests/s: {worst} at {share:.2f} of its limit", flush=True)
        return share < 1.0

    def capacity_rps(self, name: str, spec: ClusterSpec, start_rps: float) -> float:
        """Find the highest multiple of the step that holds: by doubling or halving from a start, then by halves."""
        low, high = 0.0, 0.0
        rate_rps = max(self.step_rps, round(start_rps / self.step_rps) * self.step_rps)
        while not (low and high):
            if self.holds(name, spec, rate_rps):
                low, rate_rps = rate_rps, max(rate_rps * 1.5, rate_rps + self.step_rps)
            else:
                high, rate_rps = rate_rps, rate_rps / 1.5
            rate_rps = round(rate_rps / self.step_rps) * self.step_rps
            if rate_rps < self.step_rps:
                return 0.0
        while high - low > self.step_rps:
            middle = round((low + high) / 2 / self.step_rps) * self.step_rps
            low, high = (middle, high) if self.holds(name, spec, middle) else (low, middle)
        return low

    def best_mix(self, name: str, spec: ClusterSpec, start_rps: float) -> tuple[float, str]:
        """Move machines between the phases as long as it gains; total power or cost stay where both are of one kind."""
        first, second = spec.workers
        if first.kind != second.kind:
            return self.capacity_rps(name, spec, start_rps), f"{first.count}+{second.count}"
        total, tried = first.count + second.count, dict[int, float]()

        def at(prefill: int) -> float:
            if prefill not in tried:
                workers = (replace(first, count=prefill), replace(second, count=total - prefill))
                begin_rps = max(tried.values(), default=start_rps)
                label = f"{name} {prefill}+{total - prefill}"
                tried[prefill] = self.capacity_rps(label, replace(spec, workers=workers), begin_rps)
            return tried[prefill]

        place, stride = first.count, 8
        while stride:
            better = max((near for near in (place - stride, place, place + stride) if 0 < near < total), key=at)
            place, stride = (better, stride) if better != place else (place, stride // 2)
        return tried[place], f"{place}+{total - place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iso", choices=("power", "cost"), default="power")
    parser.add_argument("--cluster", action="append", choices=CLUSTER_NAMES)
    parser.add_argument("--corrected", action="store_true")
    parser.add_argument("--chunks", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--span-s", type=float, default=60.0)
    parser.add_argument("--name", default="", help="more of the result file's name, such as that of the clusters")
    parser.add_argument("--step-rps", type=float, default=10.0)
    args = parser.parse_args()
    base = read_spec(CLUSTERS / "splitwise-isopower-baseline-a100.yaml")
    alone = (corrected(base) if args.corrected else base).cost_model().on("a100")
    batching = Plugin(use="mixed-chunked") if args.chunks else WHOLE_PROMPTS
    search = Search(alone, args.span_s, args.step_rps, batching)
    artefact = ARTEFACT_RPS[args.iso]
    found: dict[str, float] = {}
    mixes: dict[str, str] = {}
    for name in args.cluster or CLUSTER_NAMES:
        spec = read_spec(CLUSTERS / f"splitwise-iso{args.iso}-{name}.yaml")
        spec = corrected(spec) if args.corrected else spec
        start_rps = artefact.get(name, START_RPS)
        if args.search and len(spec.workers) > 1:
            found[name], mixes[name] = search.best_mix(name, spec, start_rps)
        else:
            found[name] = search.capacity_rps(name, spec, start_rps)
        told = f"the artefact {artefact.get(name)}, mix {mixes.get(name, 'as published')}"
        print(f"{name:14} {found[name]:.0f} requests/s, {told}", flush=True)
    flags = {"corrected": args.corrected, "chunks": args.chunks, "search": args.search}
    store(
        "-".join([f"splitwise-iso{args.iso}", *(flag for flag, given in flags.items() if given), *args.name.split()]),
        {
            "span_s": args.span_s,
            "artefact_rps": {name: artefact.get(name) for name in found},
            "simulated_rps": found,
            "simulated_mixes": mixes,
            "published_ratios": {
                "power": {"aa over baseline-a100": 2.15, "ha over baseline-h100": 1.18},
                "cost": {"aa over baseline-h100": 1.4},
            }[args.iso],
            "simulated_ratios": _ratios(found),
        },
    )


def _ratios(found: dict[str, float]) -> dict[str, float]:
    pairs = (
        *(("aa", "baseline-a100"), ("aa", "baseline-h100"), ("ha", "baseline-h100")),
        *(("hh", "baseline-h100"), ("hhcap", "baseline-h100"), ("hhcap", "baseline-a100")),
    )
    return {f"{a} over {b}": round(found[a] / found[b], 2) for a, b in pairs if found.get(a) and found.get(b)}


if __name__ == "__main__":
    main()
