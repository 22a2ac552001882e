"""`baton tune`: choose the policies of a fleet by simulation, and write them for `baton serve`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from random import Random
from statistics import fmean

from baton.cli.output import warn, write_file
from baton.core.config import PolicyChoice
from baton.core.errors import ConfigError
from baton.core.files import in_file, output_problems
from baton.core.types import Slo
from baton.lab.plan.tune import MARGIN_RATIO, draws_of, judge, policy_toml, tune
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.arrivals import PoissonArrivals
from baton.lab.workload.request import Trace
from baton.lab.workload.retime import missing_times_reason, retime
from baton.lab.workload.schedule import mean_rate_rps
from baton.lab.workload.source import read_workload

DESCRIPTION = """Choose a fleet's policies by simulation: the default set, with other options if better, or a published
one. The second half of the trace checks what the first half chose. See docs/policies.md.

Exit code: 0; 2 for bad arguments."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--cluster", type=Path, required=True, metavar="FILE", help="as for baton sim")
    add("--trace", type=Path, required=True, metavar="FILE", help="as for baton sim")
    add("--ttft-slo-s", type=float, required=True, metavar="X", help="target of TTFT, in seconds")
    add("--tpot-slo-s", type=float, required=True, metavar="Y", help="target of TPOT, in seconds")
    add("--rate", type=float, metavar="R", help="requests per second to tune for (default: the trace's)")
    add("--requests", type=int, default=300, metavar="N", help="maximum of a simulation")
    add("--simulations", type=int, default=400, metavar="N", help="their maximum")
    add("--seed", type=int, default=0, metavar="S", help="seed of a workload file")
    add("--policy-out", type=Path, metavar="FILE", help="write policies and SLO for baton serve --config")


def run(args: argparse.Namespace) -> int:
    """Tune, print the result and write the file. Return the exit code. Raises ConfigError with every problem."""
    spec, trace = _read(args)
    slo = Slo(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)
    with in_file(args.trace, "the trace"):
        choosing, judging = draws_of(trace, args.rate, requests_max=args.requests)
    found = tune(spec, choosing, slo, simulations_max=args.simulations, tell=lambda words: warn([words]))
    lines = [
        f"policies: {found.name} ({found.simulations} simulations)",
        f"first half of the trace: {fmean(found.ratios):.1%} within the SLO, default {fmean(found.default_ratios):.1%}",
    ]
    if found.choice == PolicyChoice():
        lines.append(f"no other choice was more than {MARGIN_RATIO:.0%} better, and better in every part of it")
    lines += [f"second half: {line}" for line in judge(spec, judging, slo, found)]
    print(*lines, sep="\n")  # noqa: T201
    if args.policy_out is not None:
        made_for = f"baton tune --cluster {args.cluster.name} --trace {args.trace.name}"
        write_file(args.policy_out, policy_toml(found.choice, slo, [made_for, *lines]).encode())
    return 0


def _read(args: argparse.Namespace) -> tuple[ClusterSpec, Trace]:
    """Return the cluster and the trace. Raises ConfigError with every problem of the arguments and files."""
    problems = [
        f"{flag} is {value:g}, but must be above 0 and finite"
        for flag, value in (
            ("--ttft-slo-s", args.ttft_slo_s), ("--tpot-slo-s", args.tpot_slo_s), ("--rate", args.rate),
            ("--requests", args.requests), ("--simulations", args.simulations),
        )
        if value is not None and not 0 < value < math.inf
    ] + output_problems({"--policy-out": args.policy_out})  # fmt: skip
    spec, trace = ClusterSpec(), Trace(format="", timing="absolute", requests=())
    try:
        spec = read_spec(args.cluster)
    except ConfigError as error:
        problems.append(str(error))
    try:
        trace = read_workload(args.trace, seed=args.seed)
    except ConfigError as error:
        problems.append(str(error))
    else:
        if mean_rate_rps(trace) is None:
            if args.rate is None:
                problems.append(f"{args.trace}: {missing_times_reason(trace)}; give --rate R")
            elif not problems:
                trace = retime(trace, PoissonArrivals(1.0), rate_rps=args.rate, draw=Random(args.seed))
    if problems:
        raise ConfigError("\n".join(problems))
    return spec, trace
