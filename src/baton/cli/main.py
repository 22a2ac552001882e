"""`baton`: the command and its sub-commands."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import select
import sys
from collections.abc import Sequence
from importlib import import_module

from baton.cli.commands import build_parser
from baton.cli.foreign_flags import nearest_setting
from baton.core.errors import BatonError, ConfigError

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command. Return the exit code: 0 success, 1 missed SLO or failed requests, 2 bad arguments or files."""
    words = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    args, unknown = build_parser(words).parse_known_args(words)
    if args.command == "keys":  # argparse finds only the ids beside the action
        args.ids += [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
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
    parser = argparse.ArgumentParser()
    import_module(f"baton.cli.{command}").add_flags(parser)
    flags = re.findall(r"--[a-z][\w-]*", parser.format_help())
    close = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see `baton {command} --help`"
    return f"baton {command} does not take {word}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
