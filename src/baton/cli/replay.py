"""`baton replay`: feed a decision log into a fresh coordinator, or ask other policies what they would have done."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.cli.logs import Header, block_tokens, changed_policies, fresh_coordinator, open_log, other_policies
from baton.cli.output import STANDARD_OUTPUT, json_text, warn, wide_console, write_file, write_json
from baton.cli.policy_choice import HELP as POLICY_HELP
from baton.cli.simulate_log import show_simulated, simulate_log
from baton.core.errors import ConfigError
from baton.decide.control.decision_log import Decision, replay
from baton.lab.report.choices import Decided
from baton.lab.report.compare import Comparison, compare
from baton.lab.report.log_page import render_log
from baton.lab.report.log_trace import render_trace, trace_of_log
from baton.lab.report.perfetto import render_perfetto
from baton.lab.report.timeline import read_timeline
from baton.serve.live.log_file import cut_bytes

QUESTIONS: dict[Decided, str] = {
    "admit": "is it taken",
    "prefill": "who prefills",
    "decode": "who decodes",
    "first_token": "who draws the first token",
    "streaming": "when its KV goes ahead",
    "layers": "in how many groups of layers",
    "way": "which way its KV goes",
    "order": "who goes first of those that wait",
    "roles": "who changes the role",
    "scaling": "how many workers",
    "moves": "who goes on elsewhere",
}
NO_TICKS = (
    "note: nobody was asked about roles, the number of workers and moves: the log's own policies change none of them, "
    "so it has no ticks"
)
ROWS = 20
"""Differences that are shown, where not said otherwise."""

DESCRIPTION = """Feed a decision log into a fresh coordinator and compare what it decides (INV-7).

With --policy, the policies of that name are asked every question that the log's own were asked, in the situation that
really was, and their answers are compared: workers, refusals, who draws the first token, when and which way KV goes,
the order of those that wait, roles, scaling and moves, with the times that the cost model predicts for both. The log's
decisions go on being followed, so what their own choices would have led to is not seen; nor is what workers and pools
decide for themselves (batching, eviction, preemption), which no log holds.

With --simulate it is: the log's arrivals are played through the simulator, as they were decided and under other
policies (--policy) or on another cluster (--cluster), and TTFT, TPOT and goodput stand beside those of the log. How far
the first simulation is from the log says how much of the second to believe."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], purpose: str) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help=purpose,
        description=DESCRIPTION,
        epilog="Exit code: 0 the same decisions (with --policy, --simulate: compared), 1 a difference (shown), "
        "2 no such log.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "log", type=Path, metavar="LOG", help="a file that `baton serve --log` or `baton sim --log` wrote"
    )
    parser.add_argument("--policy", metavar="NAME", help=f"ask these policies too: {POLICY_HELP}")
    parser.add_argument("--simulate", action="store_true", help="play the arrivals, and compare what came of them")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="with --simulate: a cluster of docs/simulator.md, not the log's"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="with --simulate: of delays and prompts (default 0)")
    for name in ("ttft", "tpot"):
        parser.add_argument(
            f"--{name}-slo-s", type=float, metavar="X", help="with --simulate: target of requests promised nothing"
        )
    parser.add_argument(
        "--rows", type=int, default=ROWS, metavar="N", help="differences to show (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="with --policy, --simulate: write all as JSON; - for standard output"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page: roles, queues and load of every worker"
    )
    parser.add_argument(
        "--trace-out", type=Path, metavar="FILE", help="write the arrivals as a trace, for baton sim and baton bench"
    )
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Do what was asked and return the exit code. Every part reads the log again: it may be larger than memory."""
    _check(args)
    if args.html is not None or args.perfetto is not None:
        _write_pictures(args)
    if args.trace_out is not None:
        _write_trace(args)
    header, decisions = open_log(args.log)
    if args.simulate:
        code = _simulate(args)
    else:
        code = _compare(args, header, decisions) if args.policy is not None else _replay(header, decisions)
    warn(changed_policies(header))
    cut = cut_bytes(args.log)
    if cut:
        warn([f"{args.log} ends in the middle of an entry, {cut} bytes of which are there: what followed is not in it"])
    return 1 if cut else code


def _check(args: argparse.Namespace) -> None:
    problems: list[str] = []
    if args.json is not None and args.policy is None and not args.simulate:
        problems.append("--json needs --policy or --simulate")
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
    if args.rows < 0:
        problems.append(f"--rows is {args.rows}, but must be at least 0")
    if problems:
        raise ConfigError("\n".join(problems))


def _replay(header: Header, decisions: Iterator[Decision]) -> int:
    agreed, difference = replay(fresh_coordinator(header), decisions)
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


def _compare(args: argparse.Namespace, header: Header, decisions: Iterator[Decision]) -> int:
    coordinator = fresh_coordinator(header)
    found = compare(coordinator, decisions, other_policies(args.policy, header, coordinator.policies.cost))
    if args.json is not None:
        write_json(args.json, found)
    if args.json != STANDARD_OUTPUT:
        _show(found, args.policy, args.rows, wide_console())
    return 0


def _simulate(args: argparse.Namespace) -> int:
    found = simulate_log(args)
    if args.json is not None:
        write_json(args.json, found)
    if args.json != STANDARD_OUTPUT:
        what = [args.policy or "its policies", *([] if args.cluster is None else [f"on {args.cluster.name}"])]
        show_simulated(found, " ".join(what), wide_console())
    return 0


def _show(found: Comparison, policy: str, rows: int, console: Console) -> None:
    table = Table("question", "asked", "answered otherwise", title=f"the log's policies and {policy}")
    for subject, asked in found.asked.items():
        differing = found.differing.get(subject, 0)
        table.add_row(QUESTIONS[subject], f"{asked:,}", f"{differing:,} ({differing / asked:.1%})" if asked else "")
    console.print(table)
    if not found.ticks:
        console.print(NO_TICKS, markup=False, highlight=False)
    if found.recorded_ttft_s is not None and found.other_ttft_s is not None:
        console.print(
            f"predicted TTFT on average: {found.recorded_ttft_s * 1000:,.3f} ms as the log chose, "
            f"{found.other_ttft_s * 1000:,.3f} ms as {policy} would have chosen there",
            highlight=False,
        )
    if found.disagreements:
        console.print(
            f"note: {found.disagreements} events replay otherwise than the log: the code or its policies have changed",
            markup=False,
        )
    if rows and found.divergences:
        console.print(_divergences(found, policy, rows))


def _divergences(found: Comparison, policy: str, rows: int) -> Table:
    total = sum(found.differing.values())
    table = Table(
        title=f"the first {min(rows, len(found.divergences))} of {total:,} differences",
        caption="ms: what is predicted of each answer: the first token, the next step with its handoff, or the way",
        box=None,
        padding=(0, 1),
    )
    for name in ("s", "request", "question", "log", "ms", policy, "ms"):
        table.add_column(name, justify="right" if name in ("s", "ms") else "left")
    for difference in found.divergences[:rows]:
        table.add_row(
            f"{difference.at_s:,.3f}",
            difference.request_id,
            QUESTIONS[difference.subject],
            difference.recorded,
            _milliseconds(difference.recorded_s),
            difference.other,
            _milliseconds(difference.other_s),
        )
    return table


def _milliseconds(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s * 1000:,.3f}"


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
