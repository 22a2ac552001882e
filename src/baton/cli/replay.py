"""`baton replay`: feed a decision log into a fresh cluster, or simulate its arrivals under other policies."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from baton.cli.logs import Header, block_tokens, build_cluster, changed_policies, open_log
from baton.cli.output import STANDARD_OUTPUT, json_text, warn, wide_console, write_file, write_json
from baton.cli.policy_choice import HELP as POLICY_HELP
from baton.cli.simulate_log import show_simulated, simulate_log
from baton.core.errors import ConfigError
from baton.decide.control.decision_log import Decision, replay
from baton.lab.report.log_page import render_log
from baton.lab.report.log_trace import render_trace, trace_of_log
from baton.lab.report.perfetto import render_perfetto
from baton.lab.report.timeline import read_timeline
from baton.serve.live.log_file import cut_bytes

DESCRIPTION = """Feed a decision log into a fresh cluster and compare what it decides (INV-7): where requests go, which
blocks pools grant, evict and preempt, which KV is transferred and how, and what tiers write and read.

With --simulate, the log's arrivals are played through the simulator, as they were decided and under other policies
(--policy) or on another cluster (--cluster). TTFT, TPOT and goodput stand beside those of the log. How far the first
simulation is from the log tells how reliable the second is."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], purpose: str) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help=purpose,
        description=DESCRIPTION,
        epilog="Exit code: 0 the same decisions (with --simulate: played), 1 a difference (shown), 2 no such log.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "log", type=Path, metavar="LOG", help="a file that `baton serve --log` or `baton sim --log` wrote"
    )
    parser.add_argument("--simulate", action="store_true", help="play the arrivals, and compare the outcomes")
    parser.add_argument("--policy", metavar="NAME", help=f"with --simulate: other policies: {POLICY_HELP}")
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="with --simulate: a cluster of docs/simulator.md, not the log's"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="with --simulate: of delays and prompts (default 0)")
    for name in ("ttft", "tpot"):
        parser.add_argument(
            f"--{name}-slo-s", type=float, metavar="X", help="with --simulate: target of requests promised nothing"
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="with --simulate: write all as JSON; - for standard output"
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
    code = _simulate(args) if args.simulate else _replay(header, decisions)
    warn(changed_policies(header))
    cut = cut_bytes(args.log)
    if cut:
        warn([f"{args.log} ends in the middle of an entry, {cut} bytes of which are there: what followed is not in it"])
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
