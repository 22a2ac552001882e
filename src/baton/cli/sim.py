"""`baton sim`: simulate a cluster on a trace, in seconds instead of hours."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter

import msgspec
from rich.console import Console
from rich.table import Table

from baton.cli.output import STANDARD_OUTPUT, write_file, write_json
from baton.cli.policy_choice import HELP as POLICY_HELP
from baton.cli.policy_choice import policy_of
from baton.cli.tables import wide_console
from baton.cli.watching import Watching
from baton.core.errors import ConfigError
from baton.core.files import output_problems
from baton.core.types import Slo
from baton.lab.bench.flags import ATTAINMENT_MIN
from baton.lab.report.comparison import HEAD, RUNS_MAX, ComparedRun, Comparison, comparison_rows, render_comparison
from baton.lab.report.perfetto import render_perfetto
from baton.lab.report.run_page import RunPage, milliseconds, render_run
from baton.lab.report.summary import RequestRecord, Results, SloTargets, summarize
from baton.lab.sim.cells import CellJob, cell_jobs, decode_records, merge_records
from baton.lab.sim.faults import TimedFault, read_faults
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.replay_trace import play_routed
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.lab.workload.arrivals import Arrivals, PoissonArrivals
from baton.lab.workload.request import Trace
from baton.lab.workload.retime import describe_arrivals, missing_times_reason, rate_problems, read_arrivals, retime
from baton.lab.workload.schedule import scale_rate
from baton.lab.workload.source import read_workload
from baton.move.cores import usable_cores

FAILURES_SHOWN = 5
"""Maximum number of failure reasons that are printed."""

DESCRIPTION = """Run a trace on a simulated cluster, with the code that decides live. No policy sees output lengths.

Several --policy or --cluster are compared in one table and page.

Exit code: 0; 1 if a request failed, none completed, or the SLO attainment is too low; 2 for bad arguments."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--cluster",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="the cluster; see docs/simulator.md (repeatable: compare)",
    )
    add(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="a trace or a workload file (.toml); see docs/workloads.md",
    )
    add("--policy", action="append", metavar="NAME", help=f"{POLICY_HELP} (repeatable: compare; default baton)")
    add("--rate-scale", type=float, default=1.0, metavar="K", help="run the trace K times as fast")
    add("--rate", type=float, metavar="R", help="requests per second instead of the trace's own times")
    add("--arrivals", metavar="KIND", help="new arrival times, as for `baton bench`")
    add("--limit", type=int, metavar="N", help="take at most the first N requests")
    add("--seed", type=int, default=0, metavar="S", help="seed of prompts, delays and arrivals (default 0)")
    add("--ttft-slo-s", type=float, metavar="X", help="target of TTFT, in seconds")
    add("--tpot-slo-s", type=float, metavar="Y", help="target of TPOT, in seconds")
    add(
        "--processes",
        type=int,
        metavar="N",
        help="simulate at most N cells at a time (default: one per core; one with --html, --perfetto or --log)",
    )
    add("--faults", type=Path, metavar="FILE", help="faults to inject (.toml, .yaml, .json); see docs/simulator.md")
    add("--json", type=Path, metavar="FILE", help="write the results as JSON, in seconds; - for standard output")
    add("--html", type=Path, metavar="FILE", help="write a page with latencies, load, roles and queues")
    add("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    add(
        "--log",
        type=Path,
        metavar="FILE",
        help="write every decision, for baton explain and replay; one file per cell",
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """One simulation: a policy on a cluster."""

    cluster: Path
    policy: str
    spec: ClusterSpec
    faults: tuple[TimedFault, ...]


def run(args: argparse.Namespace) -> int:
    """Simulate and return the exit code. Raises ConfigError with every problem of the arguments and files."""
    args.policy = args.policy or ["baton"]
    variants, trace = _read(args)
    return _run_one(args, variants[0], trace) if len(variants) == 1 else _compare(args, variants, trace)


def _run_one(args: argparse.Namespace, variant: Variant, trace: Trace) -> int:
    started_s = perf_counter()
    spec, faults = variant.spec, variant.faults
    slo = SloTargets(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)
    drawn = args.html is not None or args.perfetto is not None
    watching = Watching(log=args.log, cells=spec.cells, drawn=drawn)
    records = _play(args, variant, trace, watching)
    results = summarize(records, slo=slo, wall_s=perf_counter() - started_s)
    if args.json != STANDARD_OUTPUT:
        _show(results, f"{args.trace.name} ({trace.format})")
    _show_remarks("failures", _failure_words(records), to_error=args.json == STANDARD_OUTPUT)
    _show_remarks("faults", _unplayed(faults, records), to_error=args.json == STANDARD_OUTPUT)
    cut = _cut_answers(records, spec)
    _show_remarks("answers cut", cut, to_error=args.json == STANDARD_OUTPUT)
    if args.json is not None:
        write_json(args.json, results)
    if args.perfetto is not None:
        write_file(args.perfetto, render_perfetto(watching.timeline))
    if args.html is not None:
        facts = [("cluster", str(variant.cluster)), ("policy", variant.policy), *_facts(args, trace)]
        page = RunPage(
            title=f"baton sim: {variant.policy} on {variant.cluster.name}",
            subtitle=f"{args.trace.name}, seed {args.seed}",
            facts=[*facts, *(("answers cut", line) for line in cut)],
            results=results,
            records=records,
            slo=slo,
            timeline=watching.timeline,
            cells=watching.records if spec.cells > 1 else (),
        )
        write_file(args.html, render_run(page).encode())
    return 1 if _is_short(results) else 0


def _is_short(results: Results) -> bool:
    missed = results.slo.attainment_ratio is not None and results.slo.attainment_ratio < ATTAINMENT_MIN
    return bool(results.failed or not results.completed or missed)


def _compare(args: argparse.Namespace, variants: Sequence[Variant], trace: Trace) -> int:
    """Simulate every variant, and show the results side by side. Return 1 if every run fell short."""
    slo = SloTargets(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)
    is_alone = len({variant.cluster.name for variant in variants}) == len(args.cluster)
    runs: list[ComparedRun] = []
    kept: list[list[RequestRecord]] = []
    for variant in variants:
        started_s = perf_counter()
        records = _play(args, variant, trace, Watching(log=None, cells=variant.spec.cells, drawn=False))
        results = summarize(records, slo=slo, wall_s=perf_counter() - started_s)
        cluster = variant.cluster.name if is_alone else str(variant.cluster)
        runs.append(ComparedRun(cluster=cluster, policy=variant.policy, results=results))
        if args.html is not None:
            kept.append(records)
        remarks = [*_failure_words(records), *_unplayed(variant.faults, records)]
        _show_remarks(f"{variant.policy}, {cluster}", remarks, to_error=args.json == STANDARD_OUTPUT)
    if args.json != STANDARD_OUTPUT:
        table = Table()
        for name in HEAD:
            table.add_column(
                name, no_wrap=name in HEAD[:2], overflow="fold", justify="left" if name in HEAD[:2] else "right"
            )
        for row in comparison_rows(runs):
            table.add_row(*row)
        wide_console().print(table)
    if args.json is not None:
        write_json(args.json, Comparison(runs=runs))
    if args.html is not None:
        facts = [f"{name}: {value}" for name, value in _facts(args, trace)]
        write_file(args.html, render_comparison(runs, kept, slo, facts).encode())
    return 1 if all(_is_short(compared.results) for compared in runs) else 0


def _play(args: argparse.Namespace, variant: Variant, trace: Trace, watching: Watching) -> list[RequestRecord]:
    """Simulate every cell: in parallel processes, or here if decisions are recorded. The results are the same."""
    slo, policy, spec = _slo(args), policy_of(variant.policy), variant.spec
    processes = min(spec.cells, args.processes or usable_cores())
    if spec.router is not None and spec.cells > 1:
        if watching.wanted:
            raise ConfigError("cells behind a router are played together: leave out --log, --html and --perfetto")
        job = CellJob(spec=spec, trace=trace, policy=policy, seed=args.seed, slo=slo, faults=variant.faults)
        return play_routed(job, spec.cells, spec.router)
    jobs = cell_jobs(spec, trace, policy, seed=args.seed, slo=slo, faults=variant.faults)
    if processes > 1 and not watching.wanted:
        return play_cells(jobs, processes=processes)
    for job in jobs:
        watching.play(job)
    return merge_records(watching.records) if spec.cells > 1 else watching.records[0]


def _slo(args: argparse.Namespace) -> Slo | None:
    """Return the SLO of the requests. As in `baton serve`, None unless both targets are given."""
    if args.ttft_slo_s is None or args.tpot_slo_s is None:
        return None
    return Slo(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)


def _facts(args: argparse.Namespace, trace: Trace) -> list[tuple[str, str]]:
    """Return the names and values of the run's arguments, for the HTML page."""
    facts = [
        ("trace", f"{args.trace} ({trace.format})"),
        ("seed", str(args.seed)),
        ("rate scale", f"{args.rate_scale:g}"),
    ]
    facts += [("faults", str(args.faults))] if args.faults is not None else []
    arrivals = _arrivals(args, [])
    facts += [("arrivals", describe_arrivals(arrivals))] if arrivals is not None else []
    optional = (("requests/s", args.rate), ("at most the first", args.limit))
    return facts + [(name, f"{value:g}") for name, value in optional if value is not None]


def _read(args: argparse.Namespace) -> tuple[list[Variant], Trace]:
    problems = _argument_problems(args)
    variants, trace = _variants(args, problems), Trace(format="", timing="absolute", requests=())
    try:
        trace = read_workload(args.trace, seed=args.seed, limit=args.limit)
    except ConfigError as error:
        problems.append(str(error))
    arrivals = _arrivals(args, problems)
    if trace.timing != "absolute" and args.arrivals is None and args.rate is None:
        problems.append(f"{args.trace}: {missing_times_reason(trace)}; give --rate R")
    if problems:
        raise ConfigError("\n".join(problems))
    if arrivals is not None:
        trace = retime(trace, arrivals, rate_rps=args.rate, draw=Random(args.seed))
    return variants, scale_rate(trace, args.rate_scale)


def _variants(args: argparse.Namespace, problems: list[str]) -> list[Variant]:
    """Return every policy on every cluster. A repeated name counts once."""
    policies, clusters = dict.fromkeys(args.policy), dict.fromkeys(args.cluster)
    count = len(policies) * len(clusters)
    if count > RUNS_MAX:
        words = f"{len(policies)} policies on {len(clusters)} clusters are {count} runs"
        problems.append(f"{words}, but at most {RUNS_MAX} are compared")
    if count > 1:
        single = {"--log": args.log, "--perfetto": args.perfetto}
        problems += [f"{flag} needs one policy and one cluster" for flag, path in single.items() if path is not None]
    found: list[Variant] = []
    for cluster in clusters:
        spec, faults = ClusterSpec(), ()
        try:
            spec = read_spec(cluster)
            faults = read_faults(args.faults, spec) if args.faults is not None else ()
        except ConfigError as error:
            problems.append(str(error))
        for policy in policies:
            try:
                configured_policies(policy_of(policy), spec)
            except ConfigError as error:
                problems += [] if str(error) in problems else [str(error)]
            found.append(Variant(cluster, policy, spec, faults))
    return found


def _arrivals(args: argparse.Namespace, problems: list[str]) -> Arrivals | None:
    """Return the arrival process that replaces the trace's times, at 1 request/s. None: keep the trace's times."""
    if args.arrivals is None:
        return None if args.rate is None else PoissonArrivals(1.0)
    try:
        arrivals = read_arrivals(args.arrivals)
    except ConfigError as error:
        problems += [f"--arrivals: {line}" for line in str(error).splitlines()]
        return None
    problems += rate_problems(arrivals, rated=args.rate is not None)
    return arrivals


def _argument_problems(args: argparse.Namespace) -> list[str]:
    values = {
        "--rate-scale": args.rate_scale,
        "--rate": args.rate,
        "--limit": args.limit,
        "--processes": args.processes,
        "--ttft-slo-s": args.ttft_slo_s,
        "--tpot-slo-s": args.tpot_slo_s,
    }
    outputs = {"--json": args.json, "--html": args.html, "--perfetto": args.perfetto, "--log": args.log}
    return [
        f"{flag} is {value:g}, but must be above 0 and finite"
        for flag, value in values.items()
        if value is not None and not 0 < value < math.inf
    ] + output_problems(outputs)


def _show(results: Results, source: str) -> None:
    """Print the results. `source`: the trace file and its format."""
    table = Table("ms", "mean", "p50", "p90", "p99")
    rows = {"TTFT": results.ttft_s, "TPOT": results.tpot_s, "ITL": results.itl_s, "E2E": results.e2e_s}
    for name, distribution in rows.items():
        table.add_row(name, *milliseconds(distribution))
    console = Console()
    console.print(table)
    console.print(f"{'trace':20} {source}", markup=False, highlight=False, soft_wrap=True)
    facts = msgspec.to_builtins(results)
    for name in ("requests", "completed", "failed", "rejected", "duration_s", "requests_per_s", "input_tokens_per_s",
                 "output_tokens_per_s", "goodput_rps", "prefix_hit_ratio", "wall_s"):  # fmt: skip
        value = facts[name]
        if value is not None:
            console.print(f"{name:20} {value:.6g}", highlight=False)
    if results.slo.attainment_ratio is not None:
        console.print(f"{'slo attainment':20} {results.slo.attainment_ratio:.4f}", highlight=False)


def _show_remarks(name: str, lines: list[str], *, to_error: bool) -> None:
    """Print remarks below the results, or on standard error if standard output has the JSON."""
    console = Console(stderr=to_error)
    for line in lines:
        console.print(f"{name:20} {line}", markup=False, highlight=False, soft_wrap=True)


def _unplayed(faults: Sequence[TimedFault], records: Sequence[RequestRecord]) -> list[str]:
    """Return a remark if faults are scheduled for a time after the end of the last request."""
    end_s = max((record.end_s for record in records), default=0.0)
    late = [fault for fault in faults if fault.at_s > end_s]
    return [f"{len(late)} of {len(faults)} come after the last request has ended, at {end_s:.1f} s"] if late else []


def _cut_answers(records: Sequence[RequestRecord], spec: ClusterSpec) -> list[str]:
    """Return lines that count the truncated answers by cause and the missing tokens. Empty if no answer was cut."""
    cut = [record for record in records if record.cut_tokens]
    if not cut:
        return []
    full = [record for record in cut if record.input_tokens + record.output_tokens >= spec.request_tokens_max]
    asked = len(cut) - len(full)
    words: list[str] = []
    if asked:
        words.append(
            f"{_share(asked, records)} end at output_tokens_max = {spec.output_tokens_max} of the cluster file"
        )
    if full:
        room = f"the KV of a host ({spec.request_tokens_max} tokens, prompt included)"
        words.append(f"{_share(len(full), records)} fill {room}: raise kv.blocks")
    lost, had = sum(record.cut_tokens for record in cut), sum(r.output_tokens + r.cut_tokens for r in records)
    return [*words, f"{lost} of {had} output tokens of the trace were not generated"]


def _share(count: int, records: Sequence[RequestRecord]) -> str:
    return f"{count} of {len(records)} answers"


def _failure_words(records: Sequence[RequestRecord]) -> list[str]:
    """Return the reasons of failed requests with their counts, the most frequent first."""
    reasons = Counter(record.failure for record in records if record.outcome == "failed").most_common()
    words = [f"{requests:,}: {reason}" for reason, requests in reasons[:FAILURES_SHOWN]]
    rest = sum(requests for _, requests in reasons[FAILURES_SHOWN:])
    return words + ([f"{rest:,}: {len(reasons) - FAILURES_SHOWN:,} other reasons"] if rest else [])


def play_cells(jobs: Sequence[CellJob], *, processes: int) -> list[RequestRecord]:
    """Simulate all cells of a cluster in processes, at most `processes` at a time. Return the requests' records.

    Raises ConfigError with the last output line of a process that failed.
    """
    with ThreadPoolExecutor(max_workers=processes) as threads:  # a thread only waits for its process
        return merge_records(threads.map(_played, jobs))


def _played(job: CellJob) -> list[RequestRecord]:
    command = [sys.executable, "-m", "baton.lab.sim.replay_trace"]
    done = subprocess.run(command, input=msgspec.msgpack.encode(job), capture_output=True, check=False)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ConfigError(
            f"the simulation of a cell exited with {done.returncode}: {words[-1]}; lower --processes if memory is short"
        )
    return decode_records(done.stdout)
