"""Flags and signals of commands that serve gRPC beside a server: `baton keda` and `baton picker`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any

from baton.core.http_config import is_loopback


def add_listening(parser: argparse.ArgumentParser, port: int) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=port, metavar="P", help="port to listen on (default: %(default)s)")
    add("--insecure", action="store_true", help="allow an address beyond loopback: clients need no key")


def listening_problems(args: argparse.Namespace, allowed: str) -> list[str]:
    """Return what is wrong with these flags. `allowed`: what others may do at an address beyond loopback."""
    problems: list[str] = []
    if not is_loopback(args.host) and not args.insecure:
        problems.append(f"--host is {args.host}, so other machines may {allowed}: allow that with --insecure")
    if not 1 <= args.port <= 65535:
        problems.append(f"--port is {args.port}, but must be between 1 and 65535")
    return problems


def listening_address(args: argparse.Namespace) -> str:
    """Return `HOST:PORT`, with an IPv6 address in brackets."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"{host}:{args.port}"


async def serve_until_signal(serving: Coroutine[Any, Any, None]) -> None:
    """Run a server until SIGINT or SIGTERM arrives, which cancels it. Its errors are raised."""
    task = asyncio.create_task(serving)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
