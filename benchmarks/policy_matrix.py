"""SLO attainment of the default policy and of published ones over many fleets, loads and SLOs. No GPU is needed.

    python benchmarks/policy_matrix.py [--half tuned|held-out] [--row NAME] [--policy NAME] [--as NAME] [--seeds N]
                                       [--quick | --find | --table]

Plays every cell of `_policy_cells.py` in the simulator: 0.6, 0.9 and 1.2 of each row's capacity. Writes
benchmarks/results/policy-matrix.json; what is not played again stays in it. --as stores the figures of one policy under
another name, to compare versions. --quick plays a third of the requests and stores nothing. --find finds the capacity
of a row with published policies. --table prints the result file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from _policy_cells import HALVES, LOADS, Half, Row
from record import RESULTS, environment, table, write

from baton.core.types import Slo
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace

NAME, OURS = "policy-matrix", "baton"
PUBLISHED = (
    "distserve", "mooncake", "arrow", "cache-aware-global", "dynamo", "llm-d", "sglang", "splitwise", "sarathi",
    "tetriinfer", "llumnix",
)  # fmt: skip
FINDING = ("distserve", "sarathi")
IDLE_RPS, ENOUGH_RATIO, BISECTIONS = 0.02, 0.9, 5
Ratios = Mapping[str, Sequence[float]]
"""SLO attainment at each load, by policy."""


def attainment(spec: ClusterSpec, trace: Trace, slo: Slo, policy: str) -> float:
    """Return the share of requests that met both targets."""
    records = replay_trace(spec, trace, policy=policy, seed=0, slo=slo)
    results = summarize(records, slo=SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s), wall_s=0.0)
    return results.slo.attainment_ratio or 0.0


def play(row: Row, half: Half, policies: Sequence[str], seeds: int) -> dict[str, list[float]]:
    """Return the mean attainment of each policy at each load."""
    spec, found = row.spec(), dict[str, list[float]]()
    traces = [[row.trace(half, load * row.capacity_rps, seed) for seed in range(seeds)] for load in LOADS]
    for policy in policies:
        ratios = [[attainment(spec, trace, row.slo, policy) for trace in each] for each in traces]
        found[policy] = [round(fmean(each), 4) for each in ratios]
    return found


def find_capacity(row: Row, half: Half) -> float:
    """Return the highest rate at which a published policy keeps 90 % of the attainment that it has when idle."""
    spec, low, high = row.spec(), 0.0, row.capacity_rps

    def best(rate_rps: float) -> float:
        return max(attainment(spec, row.trace(half, rate_rps), row.slo, policy) for policy in FINDING)

    enough = ENOUGH_RATIO * best(IDLE_RPS)
    while best(high) >= enough:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if best(middle) >= enough else (low, middle)
    return low


def best_published(found: Ratios) -> list[tuple[float, str]]:
    """Return the highest attainment of a published policy at each load, and its policy."""
    return [max((found[each][index], each) for each in PUBLISHED if each in found) for index in range(len(LOADS))]


def gaps(found: Ratios, policy: str = OURS) -> list[float]:
    """Return the attainment of a policy minus that of the best published one, at each load."""
    return [ours - other for ours, (other, _) in zip(found[policy], best_published(found), strict=True)]


def summary(half: Half, rows: Sequence[Ratios], policy: str) -> str:
    """Return how a policy compares with published ones over these rows."""
    over = [gap for found in rows for gap in gaps(found, policy)]
    mean = fmean(ratio for found in rows for ratio in found[policy])
    alone = max(fmean(ratio for found in rows for ratio in found[each]) for each in PUBLISHED if each in rows[0])
    near = sum(gap >= -0.01 for gap in over)
    return (
        f"{half}, {policy}: mean {mean:.4f}, best single published policy {alone:.4f}; against the best of all in each "
        f"cell {fmean(over):+.4f}, worst {min(over):+.4f}, {near} of {len(over)} within 0.01"
    )


def print_table(rows: Mapping[str, Any]) -> None:
    """Print a line per row: our attainment, those of other versions, and the best published policy at each load."""
    names = list(dict.fromkeys(policy for row in rows.values() for policy in row["policies"]))
    names = [OURS, *(name for name in names if name not in (OURS, *PUBLISHED))]
    lines: list[list[str]] = []
    for name, row in rows.items():
        found = row["policies"]
        cells = [" / ".join(f"{ratio:.3f}" for ratio in found.get(policy, ())) for policy in names]
        has_published = any(policy in found for policy in PUBLISHED)
        other = " / ".join(f"{ratio:.3f} {policy}" for ratio, policy in best_published(found)) if has_published else ""
        lines.append([name, row["half"], f"{row['capacity_rps']:g}", *cells, other])
    print(table(["Row", "half", "capacity, req/s", *names, "best published"], lines))
    for half in HALVES:
        for policy in names:
            all_found = [row["policies"] for row in rows.values() if row["half"] == half]
            kept = [found for found in all_found if policy in found and PUBLISHED[0] in found]
            if kept:
                print(summary(half, kept, policy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=tuple(HALVES))
    parser.add_argument("--row", action="append", help="rows whose name contains this text")
    parser.add_argument("--policy", action="append", help=f"default: {OURS} and the published ones")
    parser.add_argument("--as", dest="stored_as", help="name under which the figures of one policy are stored")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="play one seed and a third of the requests; store nothing")
    parser.add_argument("--find", action="store_true", help="find capacities instead")
    parser.add_argument("--table", action="store_true", help="print the result file as a table, and play nothing")
    args = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() and not args.quick else {}
    halves: list[Half] = [args.half] if args.half else ["tuned", "held-out"]
    chosen: list[tuple[Half, Row]] = [
        (half, row) for half in halves for row in HALVES[half] if any(text in row.name for text in args.row or [""])
    ]
    commit = environment()["commit"]
    for half, row in chosen[: 0 if args.table else None]:
        cut = replace(row, requests=row.requests // 3) if args.quick or args.find else row
        if args.find:
            print(f"{row.name}: {find_capacity(cut, half):.3g}", flush=True)
            continue
        found = play(cut, half, args.policy or [OURS, *PUBLISHED], 1 if args.quick else args.seeds)
        if args.stored_as:
            found = {args.stored_as: next(iter(found.values()))}
        before = rows.get(row.name, {})
        rows[row.name] = {
            "half": half, "slo": {"ttft_s": row.slo.ttft_s, "tpot_s": row.slo.tpot_s}, "capacity_rps": row.capacity_rps,
            "requests": row.requests, "policies": {**before.get("policies", {}), **found},
            "commits": {**before.get("commits", {}), **dict.fromkeys(found, commit)},
        }  # fmt: skip
        print(row.name, json.dumps(found), file=sys.stderr, flush=True)
    ordered = {row.name: rows[row.name] for each in HALVES.values() for row in each if row.name in rows}
    if not (args.table or args.find or args.quick):
        write(NAME, {"rows": ordered})
    print_table(ordered)


if __name__ == "__main__":
    main()
