"""`baton standby`: run a server while this process holds a lease in etcd, and wait otherwise."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.cli.ask_server import check_url
from baton.cli.serve import tell
from baton.core.errors import ConfigError
from baton.move.clock import now_s
from baton.move.etcd import Etcd, EtcdError, server_key

DESCRIPTION = (
    """Run COMMAND, a `baton serve`, while this process holds a lease in etcd. Others of the same --name wait."""
)
_START = (
    "import os, sys; from baton.move.ipc.child import die_with_parent; die_with_parent(); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--etcd", required=True, metavar="URL", help="etcd, such as http://10.0.0.1:2379")
    add("--name", required=True, metavar="NAME", help="name of the fleet in etcd")
    add("--url", required=True, metavar="U", help="address of the server for its hosts")
    add("--ttl-s", type=int, default=6, metavar="T", help="length of the lease in seconds")
    add("command", nargs="+", metavar="COMMAND", help="behind --, such as -- baton serve MODEL --hosts 2")


def run(args: argparse.Namespace) -> int:
    """Run the server whenever this process is elected, until it ends. Return its exit code."""
    check_url(args.etcd)
    check_url(args.url)
    if args.ttl_s < 3:
        raise ConfigError(f"--ttl-s is {args.ttl_s}, but must be at least 3")
    standby = _Standby(
        Etcd(args.etcd, timeout_s=args.ttl_s / 12), server_key(args.name), args.url, args.ttl_s, args.command
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: standby.stop())
    return standby.run()


@dataclass(slots=True)
class _Lease:
    id: str
    renewed_s: float
    """Time just before the last successful renewal was requested. The lease lasts at least until `renewed_s` + `ttl_s`.

    -inf: the lease is lost.
    """
    is_over: threading.Event = field(default_factory=threading.Event)


class _Standby:
    """Campaigns for the lease, and runs the command while it holds it."""

    def __init__(self, etcd: Etcd, key: str, url: str, ttl_s: int, command: Sequence[str]) -> None:
        self._etcd = etcd
        self._key = key
        self._url = url
        self._ttl_s = ttl_s
        self._command = list(command)
        self._stopped = threading.Event()
        self._server: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """End the server in order, or the waiting. Called by the handler of a signal."""
        self._stopped.set()
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)

    def run(self) -> int:
        told = ""
        while not self._stopped.is_set():
            asked_s = now_s()
            try:
                lease = self._etcd.grant(self._ttl_s)
                if self._etcd.create(self._key, self._url, lease):
                    tell(f"this server is active: {self._url}")
                    code = self._serve(_Lease(lease, asked_s))
                    if code is not None:
                        return code
                    continue
                self._etcd.revoke(lease)
                news = f"standby: {self._etcd.get(self._key) or 'no server'} is active"
            except EtcdError as error:
                news = str(error)
            if news != told:
                tell(news)
            told = news
            self._stopped.wait(self._ttl_s / 3)
        return 0

    def _serve(self, lease: _Lease) -> int | None:
        """Run the server until it ends. Return its exit code. If the lease is lost first, kill it and return None."""
        server = self._server = subprocess.Popen(
            [sys.executable, "-c", _START, *self._command], stdin=subprocess.DEVNULL, start_new_session=True
        )
        if self._stopped.is_set():
            server.send_signal(signal.SIGTERM)  # the signal came before the server was known
        threading.Thread(target=self._renew, args=(lease,), daemon=True).start()
        # With checks every twelfth, the kill begins at three quarters of the lease: a quarter is left for its delays.
        while now_s() - lease.renewed_s < self._ttl_s * 2 / 3:
            try:
                code = server.wait(self._ttl_s / 12)
            except subprocess.TimeoutExpired:
                continue
            lease.is_over.set()
            with contextlib.suppress(EtcdError):
                self._etcd.revoke(lease.id)
            return code
        lease.is_over.set()
        self._server = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        tell("the lease is lost: the server was killed, another one may be active")
        return None

    def _renew(self, lease: _Lease) -> None:
        """Renew a lease until it is over or lost. A thread does it, because the look-up of a name has no deadline."""
        while not lease.is_over.wait(self._ttl_s / 6):
            asked_s = now_s()
            try:
                is_held = self._etcd.keep_alive(lease.id)
            except EtcdError as error:
                tell(str(error))
                continue
            lease.renewed_s = asked_s if is_held else -math.inf
