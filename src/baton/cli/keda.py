"""`baton keda`: give KEDA the targets of a server's scaling policy."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial

from baton.cli.ask_server import URL, check_url
from baton.cli.key_flags import ADMIN_KEY, API_KEY, add_client_key, client_key
from baton.cli.listening import add_listening, listening_address, listening_problems, serve_until_signal
from baton.cli.serve import tell
from baton.core.errors import ConfigError
from baton.integrations.keda.scaler import ServerReader, Targets, serve_scaler

PORT = 6000
_POLL_S = 1.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve KEDA's external push scaler, for a server with --launcher external. Ctrl-C ends it."
    parser.add_argument("--url", default=URL, metavar="U", help="the server (default: %(default)s)")
    add_listening(parser, PORT)
    add_client_key(parser, f"{ADMIN_KEY} or {API_KEY}")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code."""
    check_url(args.url)
    if problems := listening_problems(args, "read the targets"):
        raise ConfigError("\n".join(problems))
    asyncio.run(_serve(args.url, client_key(args, ADMIN_KEY, API_KEY), listening_address(args)))
    return 0


async def _serve(url: str, key: str | None, address: str) -> None:
    targets = Targets()
    reading = asyncio.create_task(ServerReader(url, key, targets, tell).run(_POLL_S))
    await serve_until_signal(serve_scaler(address, targets, partial(tell, f"KEDA's scaler listens on {address}")))
    reading.cancel()
