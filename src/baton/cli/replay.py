"""`baton replay`: repeat the decisions of a log and compare them, or simulate its arrivals with other policies."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from baton.cli.logs import Header, block_tokens, build_cluster, changed_policies, open_log, policies_of, spec_of
from baton.cli.output import STANDARD_OUTPUT, json_text, warn, write_file, write_json
from baton.cli.policy_choice import HELP as POLICY_HELP
from baton.cli.policy_choice import policy_of
from baton.cli.tables import wide_console
from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.decide.control.decision_log import Decision, LogHeader, replay
from baton.lab.report.log_records import LoggedRun, Outcomes, outcomes, render_trace, run_of_log, trace_of_log
from baton.lab.report.page import short_number
from baton.lab.report.perfetto import render_perfetto
from baton.lab.report.run_page import render_log
from baton.lab.report.summary import Distribution, SloTargets
from baton.lab.report.timeline import read_timeline
from baton.lab.sim.log_cluster import cluster_of_log
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec
from baton.serve.cells.log import is_cell_log, replay_cells
from baton.serve.live.log_file import cut_bytes

DESCRIPTION = """Decide the events of a log again, and compare the decisions (INV-7).

With --simulate, simulate the arrivals of a log: with its policies, and with --policy or on --cluster. How far the first
simulation is from the log tells how reliable the second is."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = "Exit code: 0 the same decisions (with --simulate: played), 1 a difference (shown), 2 no such log."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("log", type=Path, metavar="LOG", help="a file that `baton serve --log` or `baton sim --log` wrote")
    add("--simulate", action="store_true", help="play the arrivals, and compare the outcomes")
    add("--policy", metavar="NAME", help=f"with --simulate: other policies: {POLICY_HELP}")
    add("--cluster", type=Path, metavar="FILE", help="with --simulate: a cluster of docs/simulator.md, not the log's")
    add("--seed", type=int, metavar="S", help="with --simulate: seed of delays and prompts (default 0)")
    for name in ("ttft", "tpot"):
        add(f"--{name}-slo-s", type=float, metavar="X", help="with --simulate: target of requests without an SLO")
    add("--json", type=Path, metavar="FILE", help="with --simulate: write all as JSON; - for standard output")
    add("--html", type=Path, metavar="FILE", help="write a page: roles, queues and load of every worker")
    add("--trace-out", type=Path, metavar="FILE", help="write the arrivals as a trace, for baton sim and baton bench")
    add("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Produce the requested outputs and return the exit code. Each output reads the log again, to save memory."""
    _check(args)
    if is_cell_log(args.log):
        return _replay_cells(args)
    if args.html is not None or args.perfetto is not None:
        _write_pictures(args)
    if args.trace_out is not None:
        _write_trace(args)
    header, decisions = open_log(args.log)
    code = _simulate(args) if args.simulate else _replay(header, decisions)
    warn(changed_policies(header))
    cut = cut_bytes(args.log)
    if cut:
        warn([f"{args.log} ends in the middle of an entry, after {cut} bytes of it: later decisions are missing"])
    return 1 if cut else code


def _check(args: argparse.Namespace) -> None:
    problems: list[str] = []
    problems += [
        f"{flag} needs --simulate"
        for flag, value in (("--json", args.json), ("--policy", args.policy))
        if value is not None and not args.simulate
    ]
    simulating = {
        "--cluster": args.cluster,
        "--seed": args.seed,
        "--ttft-slo-s": args.ttft_slo_s,
        "--tpot-slo-s": args.tpot_slo_s,
    }
    given = {flag: value for flag, value in simulating.items() if value is not None}
    problems += [f"{flag} needs --simulate" for flag in given if not args.simulate]
    problems += [
        f"{flag} is {value:g}, but must be above 0 and finite"
        for flag, value in given.items()
        if flag.endswith("-slo-s") and not 0 < value < math.inf
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _replay(header: Header, decisions: Iterator[Decision]) -> int:
    agreed, difference = replay(build_cluster(header), decisions)
    if difference is None:
        print(f"{agreed} events, the same decisions")  # noqa: T201
        return 0
    shown = {
        "event": difference.recorded.event,
        "now_s": difference.recorded.now_s,
        "recorded": difference.recorded.commands,
        "replayed": difference.replayed,
    }
    print(f"{agreed} events agree; event {difference.index} does not:\n{json_text(shown)}")  # noqa: T201
    return 1


def _replay_cells(args: argparse.Namespace) -> int:
    """Replay a log of `baton cells`, which has no arrivals of tokens and no cluster to simulate."""
    others = {
        "--simulate": args.simulate,
        "--html": args.html,
        "--trace-out": args.trace_out,
        "--perfetto": args.perfetto,
    }
    if given := [flag for flag, value in others.items() if value]:
        raise ConfigError(
            f"{args.log} is a log of `baton cells`, which {given[0]} cannot use: give the log of a server"
        )
    agreed, difference, commands = replay_cells(args.log)
    if difference is None:
        print(f"{agreed} events, the same decisions")  # noqa: T201
        return 0
    shown = {"event": difference.event, "recorded": difference.commands, "replayed": commands}
    print(f"{agreed} events agree; event {agreed} does not:\n{json_text(shown)}")  # noqa: T201
    return 1


def _simulate(args: argparse.Namespace) -> int:
    found = simulate_log(args)
    if args.json is not None:
        write_json(args.json, found)
    if args.json != STANDARD_OUTPUT:
        what = [args.policy or "its policies", *([] if args.cluster is None else [f"on {args.cluster.name}"])]
        show_simulated(found, " ".join(what), wide_console())
    return 0


def _write_trace(args: argparse.Namespace) -> None:
    header, decisions = open_log(args.log)
    trace = trace_of_log(decisions, block_tokens=block_tokens(header))
    write_file(args.trace_out, render_trace(trace))


def _write_pictures(args: argparse.Namespace) -> None:
    _, decisions = open_log(args.log)
    timeline = read_timeline(decisions)
    if args.html is not None:
        write_file(args.html, render_log(timeline, args.log.name).encode())
    if args.perfetto is not None:
        write_file(args.perfetto, render_perfetto(timeline))


OFF_RATIO_MAX = 0.25
"""Maximum error of the simulation with the log's own policies. Above it, other simulations are not reliable."""


class Baseline(Struct, frozen=True, kw_only=True):
    """A mean latency in the log, and in a simulation of the log's arrivals with the same policies and cluster."""

    log_s: float
    simulated_s: float
    off_ratio: float
    """Relative error of the simulation: 0.25 if the simulated mean is 25 % higher than that of the log."""
    quantiles_off_ratio: dict[str, float]
    """Relative errors of the quantiles `p50`, `p90` and `p99`, by name."""


class Simulated(Struct, frozen=True, kw_only=True):
    """The metrics of a log and of simulations of its arrivals."""

    log: Outcomes
    as_logged: Outcomes
    """Simulated with the log's own policies and cluster. Its difference from `log` is the error of the simulation."""
    other: Outcomes | None
    """Simulated with the requested policies or cluster. None: none were requested."""
    baseline: dict[str, Baseline]
    """Error of `as_logged` in TTFT and TPOT."""
    notes: tuple[str, ...]
    """Remarks about information that the log lacks."""
    warnings: tuple[str, ...]
    """Reasons why the comparison is not reliable."""


def simulate_log(args: argparse.Namespace) -> Simulated:
    """Simulate a log's arrivals with its policies, and with those of `args`. Raises ConfigError for an empty log."""
    header, decisions = open_log(args.log)
    run = run_of_log(decisions)
    trace = trace_of_log(open_log(args.log)[1], block_tokens=block_tokens(header))
    if not trace.requests:
        raise ConfigError(f"{args.log}: no request arrived in this log, so there is nothing to simulate")
    cluster = _cluster(header, args.log)
    policy = policies_of(header)
    targets = SloTargets(ttft_s=args.ttft_slo_s, tpot_s=args.tpot_slo_s)

    def played(spec: ClusterSpec, config: PolicyConfig) -> Outcomes:
        return outcomes(replay_trace(spec, trace, policy=config, seed=args.seed or 0), targets)

    asked_cluster = cluster if args.cluster is None else read_spec(args.cluster)
    asked_policy = policy if args.policy is None else policy_of(args.policy)
    is_other = args.cluster is not None or args.policy is not None
    log, as_logged = outcomes(run.records, targets, is_timed=not run.untimed), played(cluster, policy)
    baseline = _baseline(log, as_logged)
    return Simulated(
        log=log,
        as_logged=as_logged,
        other=played(asked_cluster, asked_policy) if is_other else None,
        baseline=baseline,
        notes=_notes(run, log),
        warnings=_warnings(baseline),
    )


def show_simulated(found: Simulated, other: str, console: Console) -> None:
    """Print the simulation's own error, then the metrics side by side. `other`: title of the last column."""
    for name, error in found.baseline.items():
        both = (
            f"{short_number(error.log_s * 1000)} ms in the log, {short_number(error.simulated_s * 1000)} ms simulated"
        )
        rest = "".join(f", {quantile} {ratio:+.1%}" for quantile, ratio in error.quantiles_off_ratio.items())
        shown = f"error of the simulation, mean {name.upper()}: {both} ({error.off_ratio:+.1%}){rest}"
        console.print(shown, markup=False, highlight=False)
    columns = {"the log": found.log, "simulated as it was": found.as_logged}
    if found.other is not None:
        columns[f"simulated, {other}"] = found.other
    rows = {name: _rows(outcome) for name, outcome in columns.items()}
    table = Table("", *columns)
    for label in next(iter(rows.values())):
        table.add_row(label, *(cells[label] for cells in rows.values()))
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def _rows(outcome: Outcomes) -> dict[str, str]:
    rows = {
        "requests": f"{outcome.requests:,}",
        "completed, failed, refused": f"{outcome.completed:,}, {outcome.failed:,}, {outcome.rejected:,}",
        "rejected, as there was no worker": f"{outcome.no_worker:,}",
        "in SLO": "-" if outcome.attainment_ratio is None else f"{outcome.attainment_ratio:.1%}",
        "goodput, requests/s": "-" if outcome.goodput_rps is None else f"{outcome.goodput_rps:.4g}",
    }
    for name, values in (("TTFT", outcome.ttft_s), ("TPOT", outcome.tpot_s), ("E2E", outcome.e2e_s)):
        rows[f"{name} ms: mean, p50, p90, p99"] = _milliseconds(values)
    return rows


def _milliseconds(values: Distribution) -> str:
    shown = (values.mean, values.p50, values.p90, values.p99)
    return "-" if values.mean is None else ", ".join(short_number((value or 0.0) * 1000) for value in shown)


def _baseline(log: Outcomes, as_logged: Outcomes) -> dict[str, Baseline]:
    """Return the error of the simulation with the log's own policies, for each latency that was measured in both."""
    latencies = {"ttft": (log.ttft_s, as_logged.ttft_s), "tpot": (log.tpot_s, as_logged.tpot_s)}
    found: dict[str, Baseline] = {}
    for name, (real, simulated) in latencies.items():
        if not real.mean or simulated.mean is None:
            continue
        quantiles = {
            "p50": (real.p50, simulated.p50),
            "p90": (real.p90, simulated.p90),
            "p99": (real.p99, simulated.p99),
        }
        found[name] = Baseline(
            log_s=real.mean,
            simulated_s=simulated.mean,
            off_ratio=simulated.mean / real.mean - 1.0,
            quantiles_off_ratio={
                quantile: simulated_s / real_s - 1.0
                for quantile, (real_s, simulated_s) in quantiles.items()
                if real_s and simulated_s is not None
            },
        )
    return found


def _warnings(baseline: dict[str, Baseline]) -> tuple[str, ...]:
    off = [name.upper() for name, means in baseline.items() if abs(means.off_ratio) > OFF_RATIO_MAX]
    if not off:
        return ()
    return (
        f"a simulation with the log's own policies differs from the log's {' and '.join(off)} by more than "
        f"{OFF_RATIO_MAX:.0%}: do not trust the other results either; give the server a cost model that was fitted to "
        "it ([cost] in its configuration), and write a new log",
    )


def _notes(run: LoggedRun, log: Outcomes) -> tuple[str, ...]:
    notes: list[str] = []
    unfinished = run.open + sum(record.outcome != "finished" for record in run.records)
    if unfinished:
        notes.append(
            f"{unfinished} requests of the log have no known length (refused, cancelled, failed or still open): the "
            "simulation gives them the mean length of the others, at most the limit that their clients set"
        )
    if log.no_worker:
        notes.append(
            f"{log.no_worker} requests of the log were rejected because there was no worker, not by a policy; in the "
            "simulation, the workers are there from the beginning"
        )
    if run.untimed:
        notes.append(
            f"the log lacks the time of the first token of {run.untimed} requests with more than one token: its TTFT "
            "and TPOT are those of the other requests, and its SLO attainment and goodput are unknown"
        )
    elif log.attainment_ratio is None and log.completed:
        notes.append("no request has an SLO: give --ttft-slo-s and --tpot-slo-s to see SLO attainment and goodput")
    return tuple(notes)


def _cluster(header: Header, log: Path) -> ClusterSpec:
    return cluster_of_log(header, open_log(log)[1]) if isinstance(header, LogHeader) else spec_of(header)
