"""`baton`: the command and its sub-commands."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata

from baton.cli import bench, replay, serve, sim, top
from baton.core.errors import BatonError, ConfigError

EXIT_FINE, EXIT_SHORT, EXIT_USAGE = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    """Describe every sub-command. `docs/cli.md` is generated from this."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models, prefill and decode apart, over one KV cache per host.",
    )
    parser.add_argument("--version", action="version", version=f"baton {metadata.version('baton')}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_parser(subparsers)
    bench.add_parser(subparsers)
    sim.add_parser(subparsers)
    replay.add_parser(subparsers)
    top.add_parser(subparsers)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command. Exit codes: 0 fine, 1 ran but fell short, 2 bad arguments or configuration."""
    args = build_parser().parse_args(arguments)
    try:
        return args.run(args)
    except ConfigError as error:
        print(*(f"baton: {line}" for line in str(error).splitlines()), sep="\n", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
