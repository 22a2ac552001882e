"""SLO attainment of the default policy and of published ones over many fleets, loads and SLOs. No GPU is needed.

    python benchmarks/policy_matrix.py [--half tuned|held-out] [--row NAME] [--policy NAME] [--as NAME] [--seeds N]
                                       [--seconds S] [--again | --quick | --find | --table]

Plays every cell of `_policy_cells.py` in the simulator: 0.6, 0.9 and 1.2 of each row's capacity. Stores each result in
benchmarks/results/policy-matrix.json at once, and plays only what is not stored yet, so that a run can be continued;
--again replaces stored results, and --seconds starts nothing after that time. --as stores the figures of one policy
under another name, to compare versions. --quick plays a third of the requests and stores nothing. --find finds the
capacity of a row with published policies, and how many requests it needs. --table prints the result file.

--policy baton-tuned plays the policies that `baton tune` chooses for each row, by data that the row's cells do not use:
the other half, with other seeds. Runs that play different rows or policies may run at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fcntl import LOCK_EX, flock
from itertools import product
from math import ceil
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import msgspec
from _policy_cells import HALVES, LOADS, Half, Row
from record import RESULTS, environment, table

from baton.core.config import PolicyChoice, PolicyConfig
from baton.decide.policy.policy_sets import resolve
from baton.lab.plan.tune import DRAWS, attainment_ratio, tune
from baton.lab.plan.tune import LOADS as TUNED_LOADS
from baton.lab.sim.replay_trace import replay_trace

NAME, OURS, TUNED = "policy-matrix", "baton", "baton-tuned"
SEEDS, TUNING_SIMULATIONS_MAX = 3, 150
"""Seeds of the stored results: draws to choose by have other ones."""
PUBLISHED = (
    "mooncake", "distserve", "sarathi", "splitwise", "arrow", "conserve", "ampd", "pla", "cache-aware-global", "dynamo",
    "llm-d", "mooncake-no-prediction", "sglang", "tetriinfer", "llumnix",
)  # fmt: skip
"""In the order in which they are played, so that a run that is stopped has the same ones for every row."""
FINDING = ("distserve", "sarathi")
REQUESTS_MIN, REQUESTS_MAX, ANSWERS_MIN = 200, 2000, 6
IDLE_RPS, ENOUGH_RATIO, BISECTIONS, DOUBLED_MAX = 0.02, 0.9, 5, 64
Ratios = Mapping[str, Sequence[float]]
"""SLO attainment at each load, by policy."""
NEAR_RATIO, BEHIND_RATIO = 0.01, 0.03
"""A cell is near the best published policy, or behind it, by these differences of the attainment."""


def tuned(row: Row, half: Half) -> PolicyChoice:
    """Return the policies that are chosen for a row by the other half, and by seeds that are not reported."""
    other: Half = "held-out" if half == "tuned" else "tuned"
    draws = [[row.trace(other, load * row.capacity_rps, SEEDS + draw) for load in TUNED_LOADS] for draw in range(DRAWS)]
    return tune(row.spec(), draws, row.slo, simulations_max=TUNING_SIMULATIONS_MAX, tell=lambda _: None).choice


def play(row: Row, half: Half, policy: str | PolicyConfig, seed: int) -> list[float]:
    """Return the attainment of a policy at each load."""
    spec = row.spec()
    traces = [row.trace(half, load * row.capacity_rps, seed) for load in LOADS]
    return [round(attainment_ratio(spec, trace, row.slo, policy), 4) for trace in traces]


def means(stored: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Return the mean attainment over the seeds at each load, by policy."""
    return {policy: [fmean(each) for each in zip(*ratios, strict=True)] for policy, ratios in stored.items()}


def find_capacity(row: Row, half: Half) -> float:
    """Return the highest rate at which a published policy keeps 90 % of the attainment that it has when idle.

    The row's own capacity is the first guess. Raises ValueError if so few requests never fill the fleet.
    """
    spec, low, high = row.spec(), 0.0, row.capacity_rps

    def best(rate_rps: float) -> float:
        return max(attainment_ratio(spec, row.trace(half, rate_rps), row.slo, policy) for policy in FINDING)

    enough = ENOUGH_RATIO * best(IDLE_RPS)
    while best(high) >= enough:
        low, high = high, 2 * high
        if high > DOUBLED_MAX * row.capacity_rps:
            raise ValueError(f"{row.name}: {row.requests} requests do not fill the fleet; give the row more")
    while not low:
        low, high = (high / 2, high) if best(high / 2) >= enough else (low, high / 2)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if best(middle) >= enough else (low, middle)
    return low


def sized(row: Row, half: Half) -> Row:
    """Return the row with its capacity, and so many requests that they arrive for several times a mean answer.

    Fewer would measure how a fleet fills. A row has as many as its trace has, or `REQUESTS_MAX`, if these are too few.
    """
    row = replace(row, requests=REQUESTS_MIN)
    while True:
        row = replace(row, capacity_rps=find_capacity(row, half))
        records = replay_trace(row.spec(), row.trace(half, row.capacity_rps), policy=FINDING[1], seed=0, slo=row.slo)
        answer_s = fmean(record.tpot_s * record.output_tokens for record in records if record.tpot_s is not None)
        most = min(REQUESTS_MAX, len(row.load(half, REQUESTS_MAX, 0).requests))
        needed = min(most, 100 * ceil(ANSWERS_MIN * answer_s * row.capacity_rps / 100))
        if needed <= row.requests:
            return replace(row, requests=max(REQUESTS_MIN, needed))
        row = replace(row, requests=needed)


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
    alone, name = max((fmean(ratio for found in rows for ratio in found[each]), each) for each in shared(rows))
    near, behind = (sum(gap >= -ratio for gap in over) for ratio in (NEAR_RATIO, BEHIND_RATIO))
    return (
        f"{half}, {policy}: mean {mean:.4f}, best published {alone:.4f} ({name}); against the best in each cell "
        f"{fmean(over):+.4f}, worst {min(over):+.4f}; {near} of {len(over)} within {NEAR_RATIO:g} or ahead, "
        f"{len(over) - behind} over {BEHIND_RATIO:g} behind"
    )


def shared(rows: Sequence[Ratios]) -> list[str]:
    """Return the published policies that were played on all of these rows."""
    return [each for each in PUBLISHED if all(each in found for found in rows)]


def report(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table line per row, with the best published policy at each load, and a summary of each half."""
    names = list(dict.fromkeys(policy for row in rows.values() for policy in row["policies"]))
    names = [OURS, *(name for name in names if name not in (OURS, *PUBLISHED))]
    lines: list[list[str]] = []
    for name, row in rows.items():
        found = means(row["policies"])
        cells = ["/".join(f"{ratio:.3f}" for ratio in found.get(policy, ())) for policy in names]
        best = best_published(found) if any(policy in found for policy in PUBLISHED) else []
        by = "/".join(dict.fromkeys(policy for _, policy in best))
        slo = f"{row['slo']['ttft_s']:g}/{row['slo']['tpot_s']:g}"
        ratios = "/".join(f"{ratio:.3f}" for ratio, _ in best)
        lines.append([name, row["half"], slo, f"{row['capacity_rps']:g}", *cells, ratios, by])
    summaries: list[str] = []
    for half, policy in product(HALVES, names):
        all_found = [means(row["policies"]) for row in rows.values() if row["half"] == half]
        kept = [found for found in all_found if policy in found and PUBLISHED[0] in found]
        summaries += [summary(half, kept, policy)] if kept else []
    head = ["Row", "half", "SLO, s", "capacity, req/s", *names, "best published", "by"]
    played = [found for found in (means(row["policies"]) for row in rows.values()) if PUBLISHED[0] in found]
    seeds = min((len(ratios) for row in rows.values() for ratios in row["policies"].values()), default=0)
    return {"head": head, "lines": lines, "summaries": summaries, "published": shared(played), "seeds": seeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=tuple(HALVES))
    parser.add_argument("--row", action="append", help="rows whose name contains this text")
    parser.add_argument("--policy", action="append", help=f"default: {OURS} and the published ones")
    parser.add_argument("--as", dest="stored_as", help="name under which the figures of one policy are stored")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after this time")
    parser.add_argument("--again", action="store_true", help="play what is stored, too")
    parser.add_argument("--quick", action="store_true", help="play one seed and a third of the requests; store nothing")
    parser.add_argument("--find", action="store_true", help="find capacities and numbers of requests instead")
    parser.add_argument("--table", action="store_true", help="print the result file as a table, and play nothing")
    args = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    rows = {} if args.quick else stored_rows(path)
    halves: list[Half] = [args.half] if args.half else ["tuned", "held-out"]
    chosen: list[tuple[Half, Row]] = [
        (half, row) for half in halves for row in HALVES[half] if any(text in row.name for text in args.row or [""])
    ]
    policies: list[str] = args.policy or [OURS, *PUBLISHED]
    if args.find:
        for half, row in chosen:
            found = sized(row, half)
            print(f"{row.name}: {found.capacity_rps:.3g}, {found.requests} requests", flush=True)
        return
    began_s, seeds = perf_counter(), range(1 if args.quick else args.seeds)
    for seed, policy, (half, row) in product(seeds, policies, [] if args.table else chosen):
        if perf_counter() - began_s > args.seconds:
            break
        name, kept = args.stored_as or policy, stored_row(rows, half, row)
        if not args.again and len(kept["policies"].get(name, ())) > seed:
            continue
        part = replace(row, requests=row.requests // 3) if args.quick else row
        choice = kept.get("tuned_to") if seed else None  # a run that is continued does not search again
        if policy == TUNED:
            choice = choice or msgspec.to_builtins(tuned(part, half))
        played = resolve(msgspec.convert(choice, PolicyChoice)) if policy == TUNED else policy
        ratios = play(part, half, played, seed)
        with results_locked():
            rows = rows if args.quick else stored_rows(path)
            kept = stored_row(rows, half, row)
            kept["policies"].setdefault(name, [])[seed:] = [ratios]
            kept["commits"][name] = environment()["commit"]
            if policy == TUNED:
                kept["tuned_to"] = choice
            if not args.quick:
                store(rows)
        print(f"{perf_counter() - began_s:.0f} s  {row.name}, {name}, seed {seed}: {ratios}", file=sys.stderr)
    found = report(in_order(rows))
    print(table(found["head"], found["lines"]), *found["summaries"], sep="\n")


def stored_rows(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["rows"] if path.exists() else {}


@contextmanager
def results_locked() -> Generator[None]:
    """Lock the results, so that runs at the same time do not overwrite each other's."""
    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        flock(folder, LOCK_EX)
        yield
    finally:
        os.close(folder)


def stored_row(rows: dict[str, Any], half: Half, row: Row) -> dict[str, Any]:
    """Return what is stored of a row. Results at another capacity are dropped."""
    slo = {"ttft_s": row.slo.ttft_s, "tpot_s": row.slo.tpot_s}
    facts = {"half": half, "slo": slo, "capacity_rps": row.capacity_rps, "requests": row.requests}
    if row.name not in rows or any(rows[row.name].get(key) != value for key, value in facts.items()):
        rows[row.name] = {**facts, "policies": {}, "commits": {}}
    return rows[row.name]


def in_order(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {row.name: rows[row.name] for each in HALVES.values() for row in each if row.name in rows}


def store(rows: Mapping[str, Any]) -> None:
    ordered = in_order(rows)
    record = {"command": "python benchmarks/policy_matrix.py", "environment": environment(), "report": report(ordered)}
    record |= {"rows": ordered}
    (RESULTS / f"{NAME}.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
