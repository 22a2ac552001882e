"""The process that runs Ray's client for a server: it starts hosts, watches them and starts lost ones again.

It is a process of its own, so that no fault of Ray ends a stream. If it ends, Ray ends its hosts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from baton.core.errors import ConfigError
from baton.core.http_config import is_loopback
from baton.core.types import HostId
from baton.integrations.ray.cluster import HostEndedError, HostOfRay, RayCluster, Reservation
from baton.integrations.ray.orders import (
    ConnectRay,
    EndHosts,
    FromRay,
    HostGivenUp,
    LaunchedHost,
    RayConnected,
    RayRefused,
    RetireHost,
    StartHosts,
    ToRay,
)
from baton.move.backoff import Backoff
from baton.move.clock import now_s
from baton.move.ipc.child import ParentSocket, die_with_parent

_BACKOFF = Backoff(0.5, 30.0)
_STABLE_S = 60.0
"""A host that ran for this long did not fail to start."""
_ADDED_STARTS_MAX = 3
"""Starts of a host that scaling has added. Then scaling may add another one."""


class RayHosts:
    """Keeps the hosts of a server alive on a Ray cluster."""

    def __init__(
        self,
        cluster: RayCluster,
        setup: ConnectRay,
        report: Callable[[FromRay], None],
        tell: Callable[[str], None],
        *,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._cluster = cluster
        self._setup = setup
        self._report = report
        self._tell = tell
        self._backoff = backoff
        self._url = with_address(setup.url, cluster.own_address()) if setup.is_on_all_addresses else setup.url
        self._running: dict[HostId, HostOfRay] = {}
        self._retired: set[HostId] = set()
        self._groups: set[asyncio.Task[None]] = set()
        self._is_ending = asyncio.Event()

    def problem(self) -> str:
        """Return why hosts may not reach the server. Empty: they should."""
        name = urlsplit(self._url).hostname or ""
        others = self._cluster.addresses() - {self._cluster.own_address(), name}
        if not is_loopback(name) or not others:
            return ""
        remedy = "start the server with --host 0.0.0.0, or set launcher.url"
        return f"hosts on {', '.join(sorted(others))} cannot reach {self._url}: {remedy}"

    def handle(self, order: ToRay) -> None:
        match order:
            case StartHosts():
                task = asyncio.create_task(self._keep_group(order))
                self._groups.add(task)
                task.add_done_callback(self._on_group_end)
            case RetireHost(host=host):
                self._retired.add(host)
                asyncio.get_running_loop().call_later(self._setup.leave_s, self._kill, host)
            case EndHosts():
                self._is_ending.set()
            case ConnectRay():
                pass

    async def run(self) -> None:
        """Run until `EndHosts`. No host and no placement group is left then."""
        await self._is_ending.wait()
        for task in list(self._groups):
            task.cancel()
        await asyncio.gather(*self._groups, return_exceptions=True)

    def _on_group_end(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._tell(f"a bug in Baton, please report it: {type(error).__name__}: {error}")

    async def _keep_group(self, order: StartHosts) -> None:
        reservation = self._cluster.reserve(order.title, order.resources, len(order.hosts))
        try:
            async with asyncio.TaskGroup() as hosts:
                for bundle, host in enumerate(order.hosts):
                    hosts.create_task(self._keep(order, reservation, bundle, host))
        finally:
            self._cluster.release(reservation)

    async def _keep(self, order: StartHosts, reservation: Reservation, bundle: int, host: LaunchedHost) -> None:
        """Run a host, one time after the other, until it is retired or given up."""
        failures = 0
        while host.name not in self._retired:
            began_s = now_s()
            try:
                reason = await self._run_once(order, reservation, bundle, host)
            finally:
                self._running.pop(host.name, None)
            if host.name in self._retired:
                break
            failures = 1 if now_s() - began_s > _STABLE_S else failures + 1
            self._tell(f"{host.name} is lost: {reason}")
            if host.added_worker and failures >= _ADDED_STARTS_MAX:
                self._report(HostGivenUp(host.name, reason))
                return
            await asyncio.sleep(self._backoff.pause_s(failures))
        self._retired.discard(host.name)
        self._tell(f"{host.name} has left")

    async def _run_once(self, order: StartHosts, reservation: Reservation, bundle: int, host: LaunchedHost) -> str:
        """Run a host to its end. Return the reason of its end."""
        arguments = ["host", "--join", self._url, "--name", host.name, *order.arguments]
        environment = {"BATON_JOIN_KEY": self._setup.join_key} if self._setup.join_key else {}
        running = self._running[host.name] = self._cluster.start(
            reservation, bundle, arguments=arguments, environment=environment, cores=order.cores
        )
        limit_s = self._setup.start_s if host.added_worker else None
        try:
            place = await asyncio.wait_for(self._cluster.place_of(running), limit_s)
            self._tell(f"{host.name} starts on {place}")
            return await self._cluster.end_of(running)
        except HostEndedError as error:
            return str(error)
        except TimeoutError:
            wanted = ", ".join(f"{name} {amount:g}" for name, amount in order.resources.items())
            return f"Ray has not placed it within {limit_s:g} s; no node has {wanted} free"
        finally:
            self._cluster.kill(running)

    def _kill(self, host: HostId) -> None:
        """Kill a retired host that has not left in time."""
        if host in self._running:
            self._cluster.kill(self._running[host])


def with_address(url: str, address: str) -> str:
    """Return the URL with another address."""
    parts = urlsplit(url)
    shown = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{shown}:{parts.port}"


def run_client(descriptor: int) -> int:
    """Serve on an inherited Unix socket until the parent hangs up or asks for the end. Return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; only the parent ends this process
    die_with_parent()
    parent = ParentSocket(socket.socket(fileno=descriptor))
    payload, descriptors = parent.receive_first()
    for unused in descriptors:
        os.close(unused)
    setup = msgspec.msgpack.decode(payload, type=ConnectRay)
    try:
        cluster = RayCluster(setup.address)
    except ConfigError as error:
        parent.put(msgspec.msgpack.encode(RayRefused(str(error))))
        return 1
    asyncio.run(_serve(parent, cluster, setup))
    return 0


async def _serve(parent: ParentSocket, cluster: RayCluster, setup: ConnectRay) -> None:
    def report(message: FromRay) -> None:
        parent.put(msgspec.msgpack.encode(message))

    def tell(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    hosts, loop, decoder = (
        RayHosts(cluster, setup, report, tell),
        asyncio.get_running_loop(),
        msgspec.msgpack.Decoder(ToRay),
    )

    def receive() -> None:
        while not parent.closed:
            for payload in parent.receive(wait=True) or ():
                loop.call_soon_threadsafe(hosts.handle, decoder.decode(payload))
        loop.call_soon_threadsafe(hosts.handle, EndHosts())

    threading.Thread(target=receive, name="baton-ray-orders", daemon=True).start()
    report(RayConnected(hosts.problem()))
    await hosts.run()


if __name__ == "__main__":
    sys.exit(run_client(int(sys.argv[1])))
