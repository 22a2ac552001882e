"""`baton restart`: restart the workers of a server one after the other, while the others serve."""

from __future__ import annotations

import argparse
import sys
import threading

import msgspec

from baton.cli.ask_server import URL, add_model, ask, check_url, of_model
from baton.cli.key_flags import add_client_key, client_key
from baton.core.errors import BatonError
from baton.move.clock import now_s
from baton.serve.http.wire.responses import RestartResponse
from baton.serve.http.wire.schemas import RestartRequest
from baton.serve.live.status import ClusterStatus

_POLL_S = 0.5


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Restart the workers of a server one after the other. No request fails."
    add = parser.add_argument
    add("--worker", action="append", default=[], metavar="ID", help="worker to restart; may be repeated (default: all)")
    add("--url", default=URL, metavar="U", help="the server (default: %(default)s)")
    add("--wait-s", type=float, default=600.0, metavar="T", help="seconds to wait for the workers (default 600)")
    add_client_key(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Restart the workers, and wait until all are ready. Return the exit code: 1 if that fails or takes too long."""
    check_url(args.url)
    key, pause, until_s = client_key(args), threading.Event(), now_s() + args.wait_s
    try:
        wanted = msgspec.json.encode(RestartRequest(workers=tuple(args.worker)))
        restart, show = (of_model(path, args.model) for path in ("/cluster/restart", "/cluster"))
        left = msgspec.json.decode(ask(args.url, restart, key, wanted), type=RestartResponse).restarting
        told: tuple[str, ...] = ()
        while left:
            if left != told:
                print(f"left to restart: {', '.join(left)}")  # noqa: T201
            told = left
            if now_s() > until_s:
                raise BatonError(f"{', '.join(left)} did not restart within {args.wait_s:g} s; see the server's output")
            pause.wait(_POLL_S)
            left = msgspec.json.decode(ask(args.url, show, key), type=ClusterStatus).restarting
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print("every worker is back")  # noqa: T201
    return 0
