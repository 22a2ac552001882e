"""The cells in which an earlier version of the default policy lost to published ones, played again. No GPU is needed.

    python benchmarks/policy_found.py [--case NAME] [--seconds S] [--again | --table]

Writes benchmarks/results/policy-found.json, with the attainment that was found first beside that of this version. Plays
what is not stored yet; --again replaces stored results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from _policy_cells import ARTICLES, CONV, OWN, Load, example, made
from msgspec.structs import replace
from policy_matrix import OURS
from record import RESULTS, environment, table

from baton.core.config import Topology
from baton.core.types import Slo
from baton.lab.plan.tune import attainment_ratio
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.schedule import scale_rate

NAME = "policy-found"
POLICIES = (OURS, "distserve", "mooncake", "splitwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cell with the attainment that was found first."""

    name: str
    fleet: Callable[[], ClusterSpec]
    load: Load
    slo: tuple[float, float]
    rate_rps: float
    found: str
    """The attainment of `baton`, and of the best published policy or the better fleet."""
    requests: int = 600

    def play(self, policy: str) -> float:
        spec = replace(self.fleet(), queue_requests_max=100_000, output_tokens_max=8192)
        trace = self.load("tuned", self.requests, 0)
        trace = scale_rate(trace, self.rate_rps * trace.requests[-1].at_s / len(trace.requests))
        return attainment_ratio(spec, trace, Slo(ttft_s=self.slo[0], tpot_s=self.slo[1]), policy)


SEVENTY, OPTIMUM = example("llama70b-3p1d-a100-tp8.yaml"), example("distserve-13b-4xa100-optimum.yaml")
LONG, CHATS = partial(made, 3000, 300, 0.0), partial(made, 755, 200, 0.6)
MIXED = example(OWN, Topology(mixed=4))
CASES = (
    Case(name="70b-3p1d, 4.57/s", fleet=SEVENTY, load=LONG, slo=(0.5, 0.03), rate_rps=4.57, found="0.712/0.922"),
    Case(name="70b-3p1d, 3.4/s", fleet=SEVENTY, load=LONG, slo=(0.5, 0.03), rate_rps=3.4, found="0.755/0.960"),
    Case(name="70b-3p1d, 2.5/s", fleet=SEVENTY, load=LONG, slo=(0.5, 0.03), rate_rps=2.5, found="0.863/0.988"),
    Case(name="opt13b-1p1d, 4/s", fleet=OPTIMUM, load=CHATS, slo=(0.2, 0.1), rate_rps=4, found="0.797/0.975"),
    Case(name="opt13b-1p1d, 6/s", fleet=OPTIMUM, load=CHATS, slo=(0.2, 0.1), rate_rps=6, found="0.738/0.907"),
    Case(name="opt13b-2p1d, 11/s", fleet=example("distserve-13b-2p1d.yaml"), load=partial(made, 512, 64, 0.0),
         slo=(0.4, 0.04), rate_rps=11, found="0.960/1.000"),
    Case(name="own-2p2d articles, 28.7/s", fleet=example(OWN), load=ARTICLES, slo=(1.0, 0.03), rate_rps=28.7,
         found="0.855/0.910"),
    Case(name="own-2p2d conv, 60/s", fleet=example(OWN), load=CONV, slo=(1.0, 0.03), rate_rps=60,
         found=""),
    Case(name="own-4-mixed conv, 60/s", fleet=MIXED, load=CONV, slo=(1.0, 0.03), rate_rps=60,
         found="0.618/0.880"),
)  # fmt: skip
"""The mixed fleet was compared with 2P2D of the same GPUs. Its load is not known, so a trace stands for it."""


def report(cases: dict[str, Any]) -> dict[str, Any]:
    lines = [
        [name, f"{each['slo'][0]:g}/{each['slo'][1]:g}", each["found"]]
        + [f"{each['now'][policy]:.3f}" if policy in each["now"] else "" for policy in POLICIES]
        for name, each in cases.items()
    ]
    return {"head": ["Cell", "SLO, s", "first: baton/best", *POLICIES], "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="cases whose name contains this text")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after this time")
    parser.add_argument("--again", action="store_true", help="play what is stored, too")
    parser.add_argument("--table", action="store_true", help="print the result file as a table, and play nothing")
    args = parser.parse_args()
    path, began_s = RESULTS / f"{NAME}.json", perf_counter()
    cases: dict[str, Any] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for each in () if args.table else CASES:
        kept = cases.setdefault(each.name, {"now": {}}) | {"slo": each.slo, "found": each.found}
        cases[each.name] = kept
        for policy in POLICIES if args.case in each.name else ():
            if (policy not in kept["now"] or args.again) and perf_counter() - began_s < args.seconds:
                kept["now"][policy] = round(each.play(policy), 4)
                print(f"{each.name}, {policy}: {kept['now'][policy]}", file=sys.stderr, flush=True)
    cases = {each.name: cases[each.name] for each in CASES if each.name in cases}
    found = report(cases)
    if not args.table:
        record = {"command": "python benchmarks/policy_found.py", "environment": environment(), "report": found}
        path.write_text(json.dumps(record | {"cases": cases}) + "\n")
    print(table(found["head"], found["lines"]))


if __name__ == "__main__":
    main()
