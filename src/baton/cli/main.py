"""`baton`: the command and its sub-commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import sys
from collections.abc import Collection, Sequence
from importlib import import_module, metadata

from baton.cli.foreign_flags import nearest_setting
from baton.core.errors import BatonError, ConfigError

EXIT_USAGE = 2
COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI API)",
    "host": "join a server with this machine's workers and memory",
    "pool": "give this machine's memory to hosts, for KV blocks that they share",
    "keys": "edit the API keys of a server",
    "restart": "restart the workers of a server one after the other",
    "ray": "start and end a server on a Ray cluster",
    "keda": "let KEDA scale the hosts of a server",
    "bench": "measure a server with a load",
    "sim": "simulate a cluster on a trace",
    "plan": "find the hardware, the roles and the parallelism that meet an SLO",
    "explain": "explain the decisions about one request",
    "replay": "replay a decision log and compare",
    "top": "show a server's load, latencies and KV blocks, live",
    "doctor": "say what is slow or missing on this machine, and what to do",
}
"""Purpose of each command. The module of the same name has `add_parser` and `run`. Only the module of the given command
is imported, because importing the libraries of all commands is slow."""


def build_parser(wanted: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of `baton`, with the flags of the wanted sub-commands. `docs/cli.md` is generated from it."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models, prefill and decode apart, over one KV cache per host.",
    )
    parser.add_argument("--version", action="version", version=f"baton {metadata.version('baton')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        if name in wanted:
            import_module(f"baton.cli.{name}").add_parser(subparsers, purpose)
        else:
            subparsers.add_parser(name, help=purpose)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command. Return the exit code: 0 success, 1 missed SLO or failed requests, 2 bad arguments or files."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    args, unknown = build_parser(words).parse_known_args(words)
    try:
        if unknown:
            flags = [word for word in unknown if word.startswith("-")] or unknown
            raise ConfigError("\n".join(_unknown(args.command, word) for word in flags))
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("baton: interrupted", file=sys.stderr)  # noqa: T201
        return 1
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return 1
    except ConfigError as error:
        print(*(f"baton: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE


def _output_is_closed() -> bool:
    """Return whether the reader of standard output (head, less) has exited. If so, discard the rest of the output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll reports a closed pipe even without flags
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _unknown(command: str, word: str) -> str:
    """Return an error message for an unknown argument `word`. It names the most similar flag, if there is one."""
    setting = nearest_setting(word.partition("=")[0]) if command == "serve" else ""
    if setting:
        return f"baton serve does not take {word}; {setting}"
    commands = argparse.ArgumentParser(prog="baton").add_subparsers()
    import_module(f"baton.cli.{command}").add_parser(commands, COMMANDS[command])
    flags = re.findall(r"--[a-z][\w-]*", commands.choices[command].format_help())
    close = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see `baton {command} --help`"
    return f"baton {command} does not take {word}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
