"""`baton sim`: what a cluster would have done with a trace, in seconds instead of hours."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from time import perf_counter

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.flags import ATTAINMENT_MIN
from baton.core.errors import ConfigError
from baton.metrics.summary import Distribution, Results, SloTargets, summarize
from baton.sim.policies import CHOICES, build_policies
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, load_spec
from baton.workload.arrivals import PoissonArrivals
from baton.workload.load import read_trace
from baton.workload.request import Trace
from baton.workload.schedule import scale_rate, with_arrivals

Subparsers = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]
"""What `add_subparsers` returns; argparse has no public name for it."""

DESCRIPTION = """Play a trace on a simulated cluster: the coordinator, the batchers and the KV pool are the real ones,
only time, step durations and messages are simulated. No policy sees how long an answer will be.

Exit code: 0; 1 if a request failed, none completed, or the SLO attainment is too low; 2 for bad arguments."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "sim",
        help="simulate a cluster on a trace",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="FILE", help="the cluster, as in docs/simulator.md"
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="requests: any format of baton bench")
    parser.add_argument("--policy", default="baton", metavar="NAME", help=f"{', '.join(CHOICES)} (default baton)")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="K", help="play the trace K times as fast")
    parser.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals instead of the trace's own times")
    parser.add_argument("--limit", type=int, metavar="N", help="take at most the first N requests")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts, delays and arrivals (default 0)")
    parser.add_argument("--ttft-slo-s", type=float, metavar="X", help="target for the time to the first token")
    parser.add_argument("--tpot-slo-s", type=float, metavar="Y", help="target for the time per output token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON, in seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Simulate and return the exit code. Raises ConfigError with every problem of the arguments and the files."""
    started_s = perf_counter()
    spec, trace = _read(args)
    slo = SloTargets(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)
    records = replay_trace(spec, trace, policy=args.policy, seed=args.seed)
    results = summarize(records, slo=slo, wall_s=perf_counter() - started_s)
    _show(results)
    if args.json is not None:
        _write(args.json, results)
    short = results.slo.attainment_ratio is not None and results.slo.attainment_ratio < ATTAINMENT_MIN
    return 1 if results.failed or not results.completed or short else 0


def _read(args: argparse.Namespace) -> tuple[ClusterSpec, Trace]:
    problems = _argument_problems(args)
    spec, trace = ClusterSpec(), Trace(format="", timing="absolute", requests=())
    try:
        spec = load_spec(args.cluster.read_text())
    except OSError as error:
        problems.append(f"{args.cluster}: cannot read the cluster: {error.strerror}")
    except (ConfigError, UnicodeDecodeError) as error:
        problems += [f"{args.cluster}: {line}" for line in str(error).splitlines()]
    try:
        build_policies(args.policy, spec)
    except ConfigError as error:
        problems.append(str(error))
    try:
        trace = read_trace(args.trace, limit=args.limit)
    except ConfigError as error:
        problems.append(str(error))
    if trace.timing != "absolute" and args.rate is None:
        problems.append(f"{args.trace}: its requests have no times of arrival; give --rate R")
    if problems:
        raise ConfigError("\n".join(problems))
    if args.rate is not None:
        trace = with_arrivals(trace, PoissonArrivals(args.rate), Random(args.seed))
    return spec, scale_rate(trace, args.rate_scale)


def _argument_problems(args: argparse.Namespace) -> list[str]:
    values = {
        "--rate-scale": args.rate_scale,
        "--rate": args.rate,
        "--limit": args.limit,
        "--ttft-slo-s": args.ttft_slo_s,
        "--tpot-slo-s": args.tpot_slo_s,
    }
    return [
        f"{flag} is {value:g}, but must be above 0"
        for flag, value in values.items()
        if value is not None and not value > 0
    ]


def _show(results: Results) -> None:
    table = Table("seconds", "mean", "p50", "p90", "p99")
    rows = {"TTFT": results.ttft_s, "TPOT": results.tpot_s, "ITL": results.itl_s, "E2E": results.e2e_s}
    for name, distribution in rows.items():
        table.add_row(name, *_cells(distribution))
    console = Console()
    console.print(table)
    facts = msgspec.to_builtins(results)
    for name in ("requests", "completed", "failed", "rejected", "duration_s", "requests_per_s", "input_tokens_per_s",
                 "output_tokens_per_s", "goodput_rps", "prefix_hit_ratio", "wall_s"):  # fmt: skip
        value = facts[name]
        if value is not None:
            console.print(f"{name:20} {value:.6g}", highlight=False)
    if results.slo.attainment_ratio is not None:
        console.print(f"{'slo attainment':20} {results.slo.attainment_ratio:.4f}", highlight=False)


def _cells(distribution: Distribution) -> list[str]:
    values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
    return ["" if value is None else f"{value:.4f}" for value in values]


def _write(path: Path, results: Results) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; the results are above") from error
