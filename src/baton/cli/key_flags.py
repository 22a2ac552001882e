"""Read API keys from flags, files and the environment. A key in a flag is visible to every user of the machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.core.keys import read_secret

API_KEY, ADMIN_KEY, JOIN_KEY = "BATON_API_KEY", "BATON_ADMIN_KEY", "BATON_JOIN_KEY"
ENGINE_KEY = "BATON_ENGINE_KEY"
"""Environment variables from which commands read keys, for containers."""


def add_client_key(parser: argparse.ArgumentParser, variables: str = API_KEY) -> None:
    """Add the flags for the key that a command sends to a server."""
    parser.add_argument("--api-key", metavar="K", help="sent as a bearer token")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"file with the key (default: {variables})")


def client_key(args: argparse.Namespace, *variables: str) -> str | None:
    """Return the key from a flag, a file or an environment variable. None: no key is given.

    Raises ConfigError if both flags are given.
    """
    if args.api_key is not None and args.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file are two keys: leave one of them out")
    if args.api_key_file is not None:
        return key_lines(Path(args.api_key_file))[0]
    if args.api_key is not None:
        return args.api_key
    return next((key for name in variables or (API_KEY,) if (key := take_variable(name))), None)


def key_lines(path: Path) -> list[str]:
    """Return the keys of a file, one per line. Raise ConfigError if it has none, or if other users can read it."""
    with in_file(path, "the API keys"):
        lines = [line.strip() for line in read_secret(path).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError("it has no key: write one key a line")
        return keys


def take_variable(name: str) -> str:
    """Return an environment variable and remove it, so that child processes do not inherit it. Empty: it is not set."""
    return os.environ.pop(name, "").strip()


def empty_variables(*names: str) -> list[str]:
    """Return the names of the environment variables that are set, but empty."""
    return [name for name in names if name in os.environ and not os.environ[name].strip()]
