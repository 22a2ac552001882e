"""`baton restart`: restart the workers and hosts of a server one after the other, while the others serve."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from baton.cli.ask_server import URL, add_model, ask, check_url, decode_answer, of_model
from baton.cli.key_flags import add_client_key, client_key
from baton.core.errors import BatonError
from baton.move.clock import now_s
from baton.serve.http.wire.responses import RestartResponse
from baton.serve.http.wire.schemas import DrainRequest, RestartRequest
from baton.serve.live.assembly import HOST
from baton.serve.live.status import ClusterStatus, WorkerStatus

_POLL_S = 0.5


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Restart the workers of a server one after the other. No request fails."
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--worker", action="append", default=[], metavar="ID", help="worker to restart; may be repeated (default: all)"
    )
    what.add_argument(
        "--hosts",
        action="store_true",
        help="restart the joined hosts, with the version installed there, then the server's workers",
    )
    add("--url", default=URL, metavar="U", help="the server (default: %(default)s)")
    add("--wait-s", type=float, default=600.0, metavar="T", help="seconds to wait in total (default 600)")
    add_client_key(parser)
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    """Restart the workers or hosts, and wait until all are ready. Return the exit code: 1 on failure or timeout."""
    check_url(args.url)
    rolling = _RollingRestart(args.url, args.model, client_key(args), now_s() + args.wait_s, args.wait_s)
    try:
        workers = tuple(args.worker)
        if args.hosts:
            for host in rolling.joined_hosts():
                rolling.restart_host(host)
            workers = tuple(worker.id for worker in rolling.show().workers if worker.host == HOST)
        if workers or not args.hosts:
            rolling.restart_workers(workers)
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print("every worker is back")  # noqa: T201
    return 0


@dataclass(frozen=True, slots=True)
class _RollingRestart:
    """Restarts workers and hosts one after the other. The next one begins when the previous one serves again."""

    url: str
    model: str | None
    key: str | None
    deadline_s: float
    wait_s: float
    """Time until the deadline, for error messages."""
    _pause: threading.Event = field(default_factory=threading.Event)

    def show(self) -> ClusterStatus:
        answer = ask(self.url, of_model("/cluster", self.model), self.key)
        return decode_answer(answer, ClusterStatus, self.url)

    def joined_hosts(self) -> list[str]:
        """Return the hosts with agents of their own. Raises BatonError if there is none."""
        hosts = [host.id for host in self.show().hosts if host.id != HOST]
        if not hosts:
            raise BatonError("no host has joined this server; to restart its own workers, leave out --hosts")
        return hosts

    def restart_workers(self, workers: tuple[str, ...]) -> None:
        """Have the server restart these workers, or all if `workers` is empty, and wait for them."""
        wanted = msgspec.json.encode(RestartRequest(workers=workers))
        answer = ask(self.url, of_model("/cluster/restart", self.model), self.key, wanted)
        left, told = decode_answer(answer, RestartResponse, self.url).restarting, tuple[str, ...]()
        while left:
            if left != told:
                print(f"left to restart: {', '.join(left)}")  # noqa: T201
            self._wait(f"{', '.join(left)} did not restart")
            told, left = left, self.show().restarting

    def restart_host(self, host: str) -> None:
        """Let a host leave, start its program again and join, with as many workers as before."""
        before = {worker.id: worker.pid for worker in self._workers_of(host)}
        print(f"restarting host {host}")  # noqa: T201
        wanted = msgspec.json.encode(DrainRequest(restart=True))
        ask(self.url, of_model(f"/cluster/hosts/{host}/drain", self.model), self.key, wanted)
        while sum(_is_back(worker, before) for worker in self._workers_of(host)) < len(before):
            self._wait(f"host {host} did not come back")

    def _workers_of(self, host: str) -> list[WorkerStatus]:
        return [worker for worker in self.show().workers if worker.host == host]

    def _wait(self, problem: str) -> None:
        """Wait until the next poll. Raises BatonError after the deadline: `problem`, such as "a did not restart"."""
        if now_s() > self.deadline_s:
            raise BatonError(f"{problem} within {self.wait_s:g} s; see its output and that of the server")
        self._pause.wait(_POLL_S)


def _is_back(worker: WorkerStatus, before: Mapping[str, int]) -> bool:
    """Return whether a worker is ready in a new process. `before`: process ids before the restart, by worker."""
    return worker.state == "ready" and worker.pid != before.get(worker.id)
