"""Push and pull: each policy sends requests to workers at arrival, or keeps them in one queue until a worker has room.

    python benchmarks/pull.py [--row NAME] [--requests N] [--seeds N]     # simulated, some minutes, no GPU

Plays fleets of `_policy_cells.py` at 0.6, 0.9 and 1.2 of their capacity, and one with a prefill worker that takes three
times as long for a step. Every routing is played both ways with the same SLO: with its own order at the workers
(push), and with the coordinator's fair queue `vtc` (pull). There is one tenant, so that turns go by arrival.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from _policy_cells import HALVES, LOADS, Half, Row
from msgspec import structs
from record import write

from baton.core.config import PolicyConfig
from baton.core.types import WorkerId
from baton.decide.policy.policy_sets import VTC, policy_set
from baton.lab.report.summary import SloTargets, summarize
from baton.lab.sim.cells import CellJob
from baton.lab.sim.faults import Slow, TimedFault
from baton.lab.sim.replay_trace import play_cell

ROWS = (
    "own-4-mixed conv", "70b-3p1d made", "8b-4-mixed-h100 code", "7b-16-mixed-a10 conv", "8b-3p1d-h100 agents",
)  # fmt: skip
SLOWED = "own-2p2d conv"
SLOW = Slow(worker=WorkerId("prefill-0"), at_s=0.0, for_s=600.0, factor=3.0)
"""Policies learn of it from the worker's steps only."""
ROUTINGS = {"slo-headroom": "baton", "shortest-queue": "distserve", "round-robin": "round-robin"}
"""A set of policies for each routing. It pushes."""


def ways(routing: str) -> dict[str, PolicyConfig]:
    """Return the policies that push and that pull. They differ in the place of the queue only."""
    push = policy_set(ROUTINGS[routing])
    return {"push": push, "pull": structs.replace(push, fairness=VTC)}


def play(
    row: Row, policy: PolicyConfig, load: float, seeds: int, faults: tuple[TimedFault, ...]
) -> dict[str, float | None]:
    """Return the means over the seeds. Times are those of completed requests; None: none was completed."""
    targets = SloTargets(ttft_s=row.slo.ttft_s, tpot_s=row.slo.tpot_s)
    half: Half = "tuned" if row.name in {each.name for each in HALVES["tuned"]} else "held-out"
    found: list[dict[str, float | None]] = []
    for seed in range(seeds):
        trace = row.trace(half, load * row.capacity_rps, seed)
        job = CellJob(spec=row.spec(), trace=trace, policy=policy, seed=seed, slo=row.slo, faults=faults)
        results = summarize(play_cell(job), slo=targets, wall_s=0.0)
        found.append(
            {
                "attainment_ratio": results.slo.attainment_ratio,
                "completed_ratio": results.completed / results.requests,
                "ttft_mean_s": results.ttft_s.mean,
                "ttft_p99_s": results.ttft_s.p99,
                "tpot_p99_s": results.tpot_s.p99,
                "prefix_hit_ratio": results.prefix_hit_ratio,
            }
        )
    return {key: _mean([each[key] for each in found]) for key in found[0]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 5) if known else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", help="rows whose name contains this text (default: all)")
    parser.add_argument("--requests", type=int, default=200, help="maximum per cell")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    known = {row.name: row for rows in HALVES.values() for row in rows}
    cases: dict[str, tuple[Row, tuple[TimedFault, ...]]] = {SLOWED: (known[SLOWED], ())}
    cases[f"{SLOWED}, a slow worker"] = (known[SLOWED], (SLOW,))
    cases |= {name: (known[name], ()) for name in ROWS}
    chosen = {name: case for name, case in cases.items() if any(text in name for text in args.row or [""])}
    rows: list[dict[str, Any]] = []
    for name, (row, faults) in chosen.items():
        short = replace(row, requests=min(row.requests, args.requests))
        for routing in ROUTINGS:
            for way, policy in ways(routing).items():
                cells = [play(short, policy, load, args.seeds, faults) for load in LOADS]
                rows.append(
                    {"fleet": name, "routing": routing, "way": way, "loads": dict(zip(LOADS, cells, strict=True))}
                )
                print(name, routing, way, [cell["attainment_ratio"] for cell in cells], file=sys.stderr, flush=True)
        facts = {"seeds": args.seeds, "requests_max": args.requests, "slow_factor": SLOW.factor}
        write("pull", {**facts, "rows": rows})  # a run that is stopped keeps its finished fleets
    return 0


if __name__ == "__main__":
    sys.exit(main())
