"""`baton keda`: give KEDA the targets of a server's scaling policy."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

from baton.cli.ask_server import URL, check_url
from baton.cli.key_flags import ADMIN_KEY, API_KEY, add_client_key, client_key
from baton.cli.serve import tell
from baton.core.errors import ConfigError
from baton.core.http_config import is_loopback
from baton.integrations.keda.scaler import ServerReader, Targets, serve_scaler

PORT = 6000
_POLL_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], purpose: str) -> None:
    parser = subparsers.add_parser(
        "keda",
        help=purpose,
        description="Serve KEDA's external push scaler, for a server with --launcher external. Ctrl-C ends it.",
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--url", default=URL, metavar="U", help="the server (default: %(default)s)")
    add("--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=PORT, metavar="P", help="port to listen on (default: %(default)s)")
    add("--insecure", action="store_true", help="allow an address beyond loopback: clients need no key")
    add_client_key(parser, f"{ADMIN_KEY} or {API_KEY}")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code."""
    check_url(args.url)
    if not is_loopback(args.host) and not args.insecure:
        raise ConfigError(f"--host is {args.host}, so other machines may read the targets: allow that with --insecure")
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}, but must be between 1 and 65535")
    host = f"[{args.host}]" if ":" in args.host else args.host
    asyncio.run(_serve(args.url, client_key(args, ADMIN_KEY, API_KEY), f"{host}:{args.port}"))
    return 0


async def _serve(url: str, key: str | None, address: str) -> None:
    targets = Targets()
    serving = asyncio.create_task(serve_scaler(address, targets))
    reading = asyncio.create_task(ServerReader(url, key, targets, tell).run(_POLL_S))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    tell(f"KEDA's scaler listens on {address}")
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    reading.cancel()
