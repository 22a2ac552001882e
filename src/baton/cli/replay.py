"""`baton replay`: feed a server's decision log into a fresh coordinator and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from baton.control.build import build_coordinator
from baton.control.decision_log import replay
from baton.cost.linear import LinearCost
from baton.link.log_file import read_log


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="replay a decision log and compare",
        description="Feed the log of baton serve --log FILE into a fresh coordinator and compare what it decides.",
        epilog="Exit code: 0 the same decisions, 1 a difference (shown), 2 no such log.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("log", type=Path, metavar="LOG", help="a file that `baton serve --log` wrote")


def run(args: argparse.Namespace) -> int:
    """Replay and say what came out. Returns the exit code."""
    header, decisions = read_log(args.log)
    coordinator = build_coordinator(
        header.policy, cost=LinearCost(), block_tokens=header.block_tokens, attempts_max=header.attempts_max
    )
    agreed, difference = replay(coordinator, decisions)
    if difference is None:
        print(f"{agreed} events, the same decisions")  # noqa: T201
        return 0
    shown = {
        "event": difference.recorded.event,
        "now_s": difference.recorded.now_s,
        "recorded": difference.recorded.commands,
        "replayed": difference.replayed,
    }
    text = msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    print(f"{agreed} events agree; event {difference.index} does not:\n{text}")  # noqa: T201
    return 1
