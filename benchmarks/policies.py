"""Goodput of every named policy on equal hardware: real traces near and above capacity, and a load that shifts.

    python benchmarks/policies.py [--half first|second] [--case NAME] [--policy NAME] [--split 2P2D] [--table]

Four accelerators of one host (examples/clusters/one-gpu-host.toml). A set that keeps its workers' roles has the best of
1P3D, 2P2D and 3P1D, found by trying; ours starts from each of them. Options of ours were chosen on the first half (in
time) of each trace; the second half was held out, and some loads (`_policy_loads.py`) were not played before at all.
Writes benchmarks/results/policies-HALF.json: the share of all requests that met both TTFT and TPOT, of every
split, and the best one's times the offered rate, which is the goodput. What is not played again stays in the file as it
is, with its commit. --table plays nothing and prints the file as a table.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _policy_loads import CASES, Case, Half
from msgspec.structs import replace
from record import RESULTS, environment, table, write

from baton.core.config import Topology
from baton.core.types import Slo
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.request import Trace

CLUSTER = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "one-gpu-host.toml"
SPLITS = {"1P3D": (1, 3), "2P2D": (2, 2), "3P1D": (3, 1)}
EVEN = "2P2D"
OURS = "baton"
FREE = (OURS, "pull", "sarathi", "llumnix")
"""Their choices do not depend on roles, or change them: they are given no split."""
ALIKE = ("direct", "central", "first-token-by-decode")
"""Differ from ours between hosts only."""


def attainment(spec: ClusterSpec, split: str, trace: Trace, slo: Slo, policy: str) -> float:
    """Return the share of requests that met both targets."""
    prefill, decode = SPLITS[split]
    shaped = replace(spec, topology=Topology(prefill=prefill, decode=decode))
    records = replay_trace(shaped, trace, policy=policy, seed=0, slo=slo)
    results = summarize(records, slo=SloTargets(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s), wall_s=0.0)
    return results.slo.attainment_ratio or 0.0


def splits_of(policy: str, asked: Sequence[str]) -> Sequence[str]:
    """Choose what a policy is played on: ours from each split, to see that it needs none; others that are free, one."""
    return (EVEN,) if policy in FREE and policy != OURS else asked


def play(case: Case, policies: Sequence[str], splits: Sequence[str], half: Half) -> Iterator[dict[str, Any]]:
    """Yield what the file says of the case, one policy at a time."""
    spec = replace(read_spec(CLUSTER), queue_requests_max=100_000, output_tokens_max=8192)
    trace = case.trace(half, case.requests)
    offered_rps = len(trace.requests) / trace.requests[-1].at_s
    for policy in policies:
        tried = {split: attainment(spec, split, trace, case.slo, policy) for split in splits_of(policy, splits)}
        split = EVEN if policy in FREE and EVEN in tried else max(tried, key=lambda name: tried[name])
        row = {
            "attainment_ratio": round(tried[split], 4),
            "goodput_rps": round(tried[split] * offered_rps, 3),
            "split": split,
            "splits": {name: round(ratio, 4) for name, ratio in tried.items()},
            "commit": environment()["commit"],
        }
        yield {
            "requests": len(trace.requests),
            "offered_rps": round(offered_rps, 3),
            "slo": {"ttft_s": case.slo.ttft_s, "tpot_s": case.slo.tpot_s},
            "policies": {policy: row},
        }


def kept(name: str) -> dict[str, Any]:
    """Read the cases of the result file; none where there is no such file yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["cases"] if path.exists() else {}


def store(name: str, half: Half, case: str, figures: dict[str, Any]) -> None:
    """Put what was played beside what the file has of other cases and policies; several may play at once."""
    folder = os.open(RESULTS, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    cases = kept(name)
    rows = {**cases.get(case, {}).get("policies", {}), **figures["policies"]}
    cases[case] = {**figures, "policies": {policy: rows[policy] for policy in POLICY_SETS if policy in rows}}
    ordered = {known.name: cases[known.name] for known in CASES if known.name in cases}
    write(name, {"half": half, "cluster": CLUSTER.name, "cases": ordered})
    os.close(folder)


def print_table(cases: Mapping[str, Any]) -> None:
    """Print a row per set, the best in all first, and bold what no other set exceeds."""
    heads = [
        f"{name}<br>{case['requests']}, {case['offered_rps']:.1f}/s; {case['slo']['ttft_s']:g} s, "
        f"{1000 * case['slo']['tpot_s']:g} ms"
        for name, case in cases.items()
    ]
    best = {name: max(row["attainment_ratio"] for row in case["policies"].values()) for name, case in cases.items()}
    policies = {policy for case in cases.values() for policy in case["policies"]}

    def ratio(name: str, policy: str) -> float:
        return cases[name]["policies"].get(policy, {}).get("attainment_ratio", 0.0)

    def cell(name: str, policy: str) -> str:
        row = cases[name]["policies"].get(policy)
        if row is None:
            return ""
        figure = f"{row['attainment_ratio']:.3f}"
        figure = f"**{figure}**" if row["attainment_ratio"] == best[name] else figure
        return figure if policy in FREE else f"{figure} ({row['split']})"

    order = sorted(policies, key=lambda policy: (policy != OURS, -sum(ratio(name, policy) for name in cases), policy))
    rows = [[f"`{policy}`", *(cell(name, policy) for name in cases)] for policy in order]
    starts = [case["policies"].get(OURS, {}).get("splits", {}) for case in cases.values()]
    rows.insert(
        1, [f"`{OURS}` from {', '.join(SPLITS)}", *(", ".join(f"{x:.3f}" for x in each.values()) for each in starts)]
    )
    print(table(["Share of requests in SLO (split)", *heads], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("first", "second"), default="second")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--policy", action="append", choices=sorted(POLICY_SETS))
    parser.add_argument("--split", action="append", choices=sorted(SPLITS))
    parser.add_argument("--table", action="store_true", help="print the result file as a table, and play nothing")
    args = parser.parse_args()
    name = f"policies-{args.half}"
    if args.table:
        cases = kept(name)
        for is_tuned_on in (True, False):
            print_table(
                {one.name: cases[one.name] for one in CASES if one.is_tuned_on == is_tuned_on and one.name in cases}
            )
            print()
        return
    policies = args.policy or [policy for policy in POLICY_SETS if policy not in ALIKE]
    for case in CASES:
        if case.name in args.case if args.case else case.is_tuned_on or args.half == "second":
            for figures in play(case, policies, args.split or list(SPLITS), args.half):
                store(name, args.half, case.name, figures)


if __name__ == "__main__":
    main()
