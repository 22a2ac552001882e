"""The sub-commands of `baton`, and their parser."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from importlib import import_module, metadata

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI API)",
    "host": "join a server with this machine's workers and memory",
    "standby": "run a server while no other one of its fleet runs",
    "pool": "give this machine's memory to hosts, for KV blocks that they share",
    "keys": "edit the API keys of a server",
    "restart": "restart the workers of a server one after the other",
    "ray": "start and end a server on a Ray cluster",
    "keda": "let KEDA scale the hosts of a server",
    "picker": "pick servers for the requests of an Envoy proxy",
    "cells": "route requests to several servers",
    "bench": "measure a server with a load",
    "sim": "simulate a cluster on a trace",
    "plan": "find the hardware, the roles and the parallelism that meet an SLO",
    "tune": "choose the policies of a fleet by simulation",
    "explain": "explain the decisions about one request",
    "replay": "replay a decision log and compare",
    "chat": "talk to a model in the terminal",
    "top": "show a server's load, latencies and KV blocks, live",
    "doctor": "say what is slow or missing on this machine, and what to do",
    "completion": "write a script that completes commands and flags in a shell",
}
"""Purpose of each command. The module of the same name has `add_flags` and `run`. Only the module of the given command
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
            command = import_module(f"baton.cli.{name}")
            # A flag of another server may begin like one of ours, such as --metrics: `main` says what is near.
            inner = subparsers.add_parser(name, help=purpose, allow_abbrev=name != "serve")
            command.add_flags(inner)
            inner.set_defaults(run=command.run)
        else:
            subparsers.add_parser(name, help=purpose)
    return parser
