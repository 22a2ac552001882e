"""`baton replay LOG --simulate`: the arrivals of a log, played through the simulator under other policies."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from baton.cli.logs import Header, block_tokens, open_log, policies_of, spec_of
from baton.cli.policy_choice import policy_of
from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.decide.control.decision_log import LogHeader
from baton.lab.report.log_records import LoggedRun, Outcomes, outcomes, run_of_log
from baton.lab.report.log_trace import trace_of_log
from baton.lab.report.summary import Distribution, SloTargets
from baton.lab.sim.log_cluster import cluster_of_log
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, read_spec

OFF_RATIO_MAX = 0.25
"""Above this error of the log's own simulation, other simulations of it are not reliable."""


class Baseline(Struct, frozen=True, kw_only=True):
    """A mean of the log, and what the simulation of the log as it was makes of it."""

    log_s: float
    simulated_s: float
    off_ratio: float
    """0.25: a quarter too long."""


class Simulated(Struct, frozen=True, kw_only=True):
    """The outcomes of a log, beside those that simulations of its arrivals have."""

    log: Outcomes
    as_logged: Outcomes
    """Simulated with the log's policies on the log's cluster: what differs from `log` is the simulation's error."""
    other: Outcomes | None
    """Simulated with the requested policies or cluster. None: none were requested."""
    baseline: dict[str, Baseline]
    """Of TTFT and TPOT: how far `as_logged` is from `log`."""
    notes: tuple[str, ...]
    """What the comparison does not know."""
    warnings: tuple[str, ...]
    """Why it is not to be believed."""


def simulate_log(args: argparse.Namespace) -> Simulated:
    """Play the log's arrivals as they were decided, and as `args` ask. Raises ConfigError for what cannot be played."""
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
    """Print the outcomes side by side. `other`: what the last column is called."""
    columns = {"the log": found.log, "simulated as it was": found.as_logged}
    if found.other is not None:
        columns[f"simulated, {other}"] = found.other
    rows = {name: _rows(outcome) for name, outcome in columns.items()}
    table = Table("", *columns)
    for label in next(iter(rows.values())):
        table.add_row(label, *(cells[label] for cells in rows.values()))
    console.print(table)
    for name, means in found.baseline.items():
        both = f"{means.log_s * 1000:,.4g} ms in the log, {means.simulated_s * 1000:,.4g} ms simulated as it was"
        console.print(f"mean {name.upper()}: {both} ({means.off_ratio:+.1%})", markup=False, highlight=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def _rows(outcome: Outcomes) -> dict[str, str]:
    rows = {
        "requests": f"{outcome.requests:,}",
        "completed, failed, refused": f"{outcome.completed:,}, {outcome.failed:,}, {outcome.rejected:,}",
        "given back, as no worker was there": f"{outcome.no_worker:,}",
        "in SLO": "-" if outcome.attainment_ratio is None else f"{outcome.attainment_ratio:.1%}",
        "goodput, requests/s": "-" if outcome.goodput_rps is None else f"{outcome.goodput_rps:.4g}",
    }
    for name, values in (("TTFT", outcome.ttft_s), ("TPOT", outcome.tpot_s), ("E2E", outcome.e2e_s)):
        rows[f"{name} ms: mean, p50, p90, p99"] = _milliseconds(values)
    return rows


def _milliseconds(values: Distribution) -> str:
    shown = (values.mean, values.p50, values.p90, values.p99)
    return "-" if values.mean is None else ", ".join(f"{(value or 0.0) * 1000:,.4g}" for value in shown)


def _baseline(log: Outcomes, as_logged: Outcomes) -> dict[str, Baseline]:
    """Compare the log with its own simulation, as far as both have the figures."""
    means = {
        "ttft": (log.ttft_s.mean, as_logged.ttft_s.mean),
        "tpot": (log.tpot_s.mean, as_logged.tpot_s.mean),
    }
    return {
        name: Baseline(log_s=log_s, simulated_s=simulated_s, off_ratio=simulated_s / log_s - 1.0)
        for name, (log_s, simulated_s) in means.items()
        if log_s and simulated_s is not None
    }


def _warnings(baseline: dict[str, Baseline]) -> tuple[str, ...]:
    off = [name.upper() for name, means in baseline.items() if abs(means.off_ratio) > OFF_RATIO_MAX]
    if not off:
        return ()
    return (
        f"the simulation of the log as it was misses the log's {' and '.join(off)} by more than {OFF_RATIO_MAX:.0%}: "
        "believe it of nothing else either, until the server has a cost model that was fitted to it ([cost] in its "
        "configuration)",
    )


def _notes(run: LoggedRun, log: Outcomes) -> tuple[str, ...]:
    notes: list[str] = []
    unfinished = run.open + sum(record.outcome != "finished" for record in run.records)
    if unfinished:
        notes.append(
            f"{unfinished} requests of the log have no known length (refused, cancelled, failed or still open): they "
            "are simulated as long as the others were on average, or as their clients asked for at most"
        )
    if log.no_worker:
        notes.append(
            f"{log.no_worker} requests of the log were given back because no worker was there: no policy refused them, "
            "and the simulated fleet is there from the beginning"
        )
    if run.untimed:
        notes.append(
            f"of {run.untimed} requests of more than one token the log does not know when the first came: "
            "its TTFT and TPOT are of the others, and its share in SLO and goodput are not known"
        )
    elif log.attainment_ratio is None and log.completed:
        notes.append(
            "no request was promised an SLO: give --ttft-slo-s and --tpot-slo-s for the share in SLO and the goodput"
        )
    return tuple(notes)


def _cluster(header: Header, log: Path) -> ClusterSpec:
    return cluster_of_log(header, open_log(log)[1]) if isinstance(header, LogHeader) else spec_of(header)
