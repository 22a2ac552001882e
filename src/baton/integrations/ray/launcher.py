"""The server's side of Ray: keep the process of Ray's client alive, and tell it which hosts have to run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import msgspec

from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.launching import HostGroup
from baton.core.messages import StartWorker
from baton.core.types import HostId, WorkerId
from baton.integrations.ray.cluster import check_installed
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
from baton.serve.host.child_process import ChildProcess
from baton.serve.host.tasks import spawn

_CONNECT_S = 120.0
_END_S = 15.0
_BACKOFF = Backoff(1.0, 30.0)
_MODULE = "baton.integrations.ray.process"


class RayLauncher:
    """Starts hosts on a Ray cluster, and starts them again if they are lost. Implements `HostLauncher`."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        """Raises ConfigError if the extra is missing, or hosts would have no key to join with."""
        check_installed()
        http = config.http
        self._join_key = http.join_key or http.admin_key or (http.api_keys[0] if len(http.api_keys) == 1 else "")
        if not self._join_key and (http.api_keys or http.key_file):
            raise ConfigError("hosts on Ray need a key with the scope join: set BATON_JOIN_KEY")
        self._config = config
        self._tell = tell
        self._orders = {group.title(): _start(group) for group in config.launcher.groups}
        """The placement groups that have to be there, by title."""
        self._url = ""
        self._process: ChildProcess | None = None
        self._connected: asyncio.Future[RayConnected] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_ending = False

    async def start(self, url: str, lost: Callable[[WorkerId, str], None]) -> None:
        """Connect to Ray and start the configured hosts. Raises ConfigError if there is no Ray cluster."""
        self._url = self._config.launcher.url or url
        self._connected = asyncio.get_running_loop().create_future()
        self._keeping = spawn(self._keep(lost), self._tell)
        try:
            connected = await asyncio.wait_for(asyncio.shield(self._connected), _CONNECT_S)
        except TimeoutError as error:
            address = self._config.launcher.address
            raise ConfigError(f"the Ray cluster at {address} has not answered for {_CONNECT_S:g} s") from error
        if connected.problem:
            self._tell(connected.problem)

    def launch(self, command: StartWorker) -> None:
        """Start a host for a worker that scaling asks for, with the resources of the group that has this role."""
        groups, role = self._config.launcher.groups, command.role
        like = next((group for group in groups if role in group.workers()), groups[0])
        alone = msgspec.structs.replace(like, name=command.host, hosts=1, prefill=0, decode=0, mixed=0)
        order = _start(
            msgspec.structs.replace(alone, **{role: 1}), LaunchedHost(name=command.host, added_worker=command.worker)
        )
        self._orders[order.title] = order
        self._tell(f"{command.host} is asked of Ray: scaling wants more {role}")
        self._send(order)

    def retire(self, host: HostId) -> bool:
        """Do not start this host again after its end. Return False if it was not started here."""
        found = self._forget(host)
        if found is not None:
            self._send(RetireHost(host))
        return found is not None

    async def stop(self) -> None:
        """End every host that was started."""
        self._is_ending = True
        self._send(EndHosts())
        if self._keeping is not None:
            _done, late = await asyncio.wait({self._keeping}, timeout=_END_S)
            if late and self._process is not None:
                self._process.kill()  # Ray then ends its hosts
            await asyncio.wait({self._keeping})

    def _forget(self, host: HostId) -> LaunchedHost | None:
        """Remove a host from those that have to run. Return it. None: it is not one of them."""
        for title, order in list(self._orders.items()):
            found = next((launched for launched in order.hosts if launched.name == host), None)
            if found is None:
                continue
            hosts = tuple(launched for launched in order.hosts if launched is not found)
            self._orders[title] = msgspec.structs.replace(order, hosts=hosts)
            if not hosts:
                del self._orders[title]
            return found
        return None

    async def _keep(self, lost: Callable[[WorkerId, str], None]) -> None:
        """Run the process of the client, one time after the other, until `stop`."""
        failures = 0
        while not self._is_ending:
            on_message = partial(self._on_message, lost)
            process = self._process = ChildProcess("ray", _MODULE, on_message=on_message, on_output=self._tell)
            reason = await self._run(process)
            if self._is_ending or self._has_refused():
                return
            failures += 1
            self._tell(f"{reason}; its hosts end with it and start again with the next one")
            await asyncio.sleep(_BACKOFF.pause_s(failures))

    async def _run(self, process: ChildProcess) -> str:
        """Run one process to its end. Return a description of the end."""
        unused = os.open(os.devnull, os.O_RDONLY)  # the first message of a child process has a descriptor
        try:
            await process.start(msgspec.msgpack.encode(self._connection()), (unused,), threads=1)
        except OSError as error:
            return f"the process for Ray could not be started: {error}"
        finally:
            os.close(unused)
        for order in self._orders.values():
            self._send(order)
        return await process.wait()

    def _connection(self) -> ConnectRay:
        config = self._config
        http, survival = config.http, config.survival
        address = http.admin_host if http.admin_port else http.host
        return ConnectRay(
            address=config.launcher.address,
            url=self._url,
            is_on_all_addresses=address in ("0.0.0.0", "::") and not config.launcher.url,
            join_key=self._join_key,
            start_s=survival.start_s,
            leave_s=survival.drain_s + _END_S,
        )

    def _send(self, order: ToRay) -> None:
        """Send an order. It is dropped if the process is dead: the next one gets all orders again."""
        if self._process is not None:
            self._process.send_payload(msgspec.msgpack.encode(order))

    def _has_refused(self) -> bool:
        """Return whether the first connection has failed."""
        return self._connected is not None and self._connected.done() and self._connected.exception() is not None

    def _on_message(self, lost: Callable[[WorkerId, str], None], payload: bytes) -> None:
        message: FromRay = msgspec.msgpack.decode(payload, type=FromRay)
        assert self._connected is not None
        match message:
            case RayConnected():
                if not self._connected.done():
                    self._connected.set_result(message)
            case RayRefused(reason=reason):
                if not self._connected.done():
                    self._connected.set_exception(ConfigError(reason))
                else:
                    self._tell(reason)
            case HostGivenUp(host=host, reason=reason):
                found = self._forget(host)
                if found is not None and found.added_worker:
                    lost(found.added_worker, f"{host} does not start: {reason}")


def _start(group: HostGroup, *hosts: LaunchedHost) -> StartHosts:
    """Return the order for the hosts of a group. `hosts`: those of scaling. Empty: the configured ones."""
    workers = group.workers()
    count = sum(workers.values())
    wanted = {"CPU": group.cpus, "GPU": group.gpus, "memory": float(group.memory_bytes), **group.resources}
    named = tuple(LaunchedHost(name=HostId(f"{group.title()}-{number}")) for number in range(group.hosts))
    return StartHosts(
        title=f"baton-{group.title()}",
        hosts=hosts or named,
        arguments=(*(word for role in workers for word in (f"--{role}", str(workers[role]))), *group.arguments),
        resources={name: amount * count for name, amount in wanted.items() if amount},
        cores=int(group.cpus) * count,
    )
