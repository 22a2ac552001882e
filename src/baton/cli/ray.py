"""`baton ray`: start and end a server on a Ray cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.cli.key_flags import ADMIN_KEY, API_KEY, JOIN_KEY, take_variable
from baton.cli.serve import read_config, tell
from baton.core.errors import ConfigError
from baton.integrations.ray.server_actor import start_server, stop_server


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a server and its hosts on a Ray cluster, or end them: docs/integrations/ray.md."
    add = parser.add_argument
    add("action", choices=("up", "down"), help="up: start, and wait until it is ready; down: end it")
    add("--config", type=Path, metavar="FILE", help="its configuration; paths in it are those of its node")
    add("--address", default="auto", metavar="A", help="the cluster (default: that of this machine)")


def run(args: argparse.Namespace) -> int:
    """Start or end the server. Return the exit code."""
    if args.action == "down":
        return stop_server(args.address)
    if args.config is None:
        raise ConfigError("baton ray up needs --config FILE")
    read_config(args.config)
    keys = {name: key for name in (API_KEY, ADMIN_KEY, JOIN_KEY) if (key := take_variable(name))}
    for line in start_server(args.address, args.config.read_text(encoding="utf-8"), keys):
        tell(line)
    return 0
