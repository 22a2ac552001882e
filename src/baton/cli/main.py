"""`baton`: the command and its sub-commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import sys
from collections.abc import Mapping
from importlib import metadata

from baton.cli import bench, explain, host, plan, pool, replay, serve, sim, top
from baton.core.errors import BatonError, ConfigError

EXIT_USAGE = 2


def build_parser() -> argparse.ArgumentParser:
    """Describe every sub-command. `docs/cli.md` is generated from this."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models, prefill and decode apart, over one KV cache per host.",
    )
    parser.add_argument("--version", action="version", version=f"baton {metadata.version('baton')}")
    _add_commands(parser)
    return parser


def _add_commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (serve, host, pool, bench, sim, plan, explain, replay, top):
        command.add_parser(subparsers)
    return subparsers.choices


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command. Exit codes: 0 fine, 1 ran but fell short, 2 bad arguments or configuration."""
    args, unknown = build_parser().parse_known_args(arguments)
    try:
        if unknown:
            flags = [word for word in unknown if word.startswith("-")] or unknown
            raise ConfigError("\n".join(_unknown(args.command, word) for word in flags))
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 1
    except ConfigError as error:
        print(*(f"baton: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE


def _nobody_reads() -> bool:
    """Find out whether whoever read our output (head, less) has gone, and let the rest of it go nowhere then."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are told without being asked for
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _unknown(command: str, word: str) -> str:
    """Say that a command does not take a word, with the nearest flag that it has."""
    commands = _add_commands(argparse.ArgumentParser(prog="baton"))
    flags = re.findall(r"--[a-z][\w-]*", commands[command].format_help())
    close = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see `baton {command} --help`"
    return f"baton {command} does not take {word}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
