"""One membership of a host in a cluster: from joining to the end of the host's last process.

Each membership has a new arena, unless the server has saved which KV is in the old one. Then that one is used again,
after every process that could write into it has ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from baton.compute.models.card import ModelCard
from baton.compute.models.fingerprint import kv_identity
from baton.core.config import Config
from baton.core.copies import LayersDone
from baton.core.errors import ConfigError
from baton.core.messages import StepReport, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import HostId, WorkerId
from baton.decide.kv.conversion import KVForm
from baton.move.ipc.dialing import Dialer
from baton.move.ipc.stream import FramedStream, watch
from baton.move.ipc.tls import client_context
from baton.serve.host.build import Computing, HostArena, HostParts, build_host, device_prices
from baton.serve.host.child_process import WorkerProcess
from baton.serve.host.join_request import JoinFailedError
from baton.serve.host.mover_supervisor import MoverSupervisor
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.host.tasks import prefault, run_in_thread
from baton.serve.host.tier_opening import fingerprint_of
from baton.serve.host.worker_link import WorkerLink, WorkerMessage
from baton.serve.messages.hosting import (
    Dismissed,
    ForMover,
    ForWorker,
    FromMover,
    FromWorker,
    HostHello,
    HostLeaves,
    HostPing,
    HostPong,
    JoinRefused,
    LeaveCluster,
    MoverDown,
    MoverUp,
    Resize,
    ToAgentMessage,
    Welcome,
    WorkerDown,
    WorkerStarting,
    WorkerUp,
)
from baton.serve.messages.moving import MoverEvent, MoverReady, MoverSetup
from baton.serve.messages.setup import Pong

_CONNECT_S = 10.0
_MOVER_S = 30.0
_WELCOME_S = 10.0


class OpaqueReport(msgspec.Struct, frozen=True, tag=StepReport.__name__):
    """A `StepReport` whose fields the agent does not decode: it is forwarded to the server unchanged."""


class OpaqueLayers(msgspec.Struct, frozen=True, tag=LayersDone.__name__):
    """A `LayersDone` that is forwarded to the server unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """A host's name, the address of the server, and the addresses of the host's mover."""

    host: HostId
    server: str
    """Address of the server."""
    port: int
    token: str
    tls: bool
    mover_secret: bytes
    listen: str
    """Address that the mover listens on. Empty: the local address of the connection to the server."""
    advertise: str
    """Address by which other hosts reach the mover. Empty: the address it listens on."""


@dataclass(frozen=True, slots=True)
class KeptArena:
    """An arena whose KV the next membership may use."""

    key: str
    """Equal for memberships whose KV has the same bytes."""
    arena: HostArena


class Membership:
    """Implements `WorkerListener` and `MoverListener`: forwards events over the connection to the server."""

    def __init__(
        self,
        config: Config,
        card: ModelCard,
        computing: Computing,
        tell: Callable[[str], None],
        kept: KeptArena | None = None,
    ) -> None:
        self._config = config
        self._card = card
        self._computing = computing
        self._identity = kv_identity(card)
        self._fingerprint = fingerprint_of(self._identity, computing.layout, computing.precision_key)
        self.kept = self._usable(kept)
        """The arena for the next membership. None: its KV is of no use, so the next one gets a new arena."""
        self._tell = tell
        self._stream = FramedStream[ToAgentMessage](ToAgentMessage, on_message=self._on_message, on_end=self._end)
        self._decoder = msgspec.msgpack.Decoder(
            OpaqueReport | OpaqueLayers | WorkerReady | WorkerProgress | WorkerFailed | Pong
        )
        self._links: dict[WorkerId, WorkerProcess] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._mover_up: asyncio.Future[tuple[int, MoverReady]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Welcome | JoinRefused] = asyncio.get_running_loop().create_future()
        self._mover: MoverSupervisor | None = None
        self._supervisor: Supervisor | None = None
        self._keep_as = ""
        self.is_leaving = False
        """This host was told to leave: by a signal, or by an operator of the server."""
        self.restarts = False
        """An operator wants the agent to start its program again."""
        self.failure = ""
        """Reason why no worker of this host can be kept alive. Empty: workers run or are restarting."""

    async def join_and_serve(self, address: HostAddress) -> str:
        """Join the cluster and serve until the membership ends. Return the reason; no process of the host is left then.

        Raises JoinFailedError if the host may try again, ConfigError if another attempt cannot succeed.
        """
        arena = None if self.kept is None else self.kept.arena
        parts = build_host(self._config, self._card, self._computing, address.host, f"{address.host}.", arena)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._connect(address)
            tasks.append(asyncio.create_task(watch(self._stream, self._config.hosts.silent_s, None)))
            await self._start_mover(parts, address)
            await self._enter(parts, address)
            self._start_workers(parts)
            tasks.append(asyncio.create_task(prefault(parts.arena, self._fail)))
            return await self._over
        finally:
            for task in tasks:
                task.cancel()
            self._stream.end("the membership has ended")
            await self._stop()
            if self.kept is None and not self._keep_as:
                parts.arena.close()
            else:
                arena_id = self._keep_as or parts.arena_id
                self.kept = KeptArena(self._key, HostArena(arena_id, parts.arena, parts.blocks_total))

    @property
    def _key(self) -> str:
        """Everything that the bytes of a block depend on, except its tokens."""
        return f"{self._fingerprint} {self._config.weights}"

    def _usable(self, kept: KeptArena | None) -> KeptArena | None:
        """Return the arena if its KV fits this model, else free it and return None."""
        if kept is not None and kept.key != self._key:
            kept.arena.bytes.close()
            return None
        return kept

    def leave(self, reason: str) -> None:
        """Leave the cluster after the server has moved the running requests away, for which it has `drain_s` seconds.

        A second call ends the membership at once, and so does a call before the host has joined.
        """
        was_leaving, self.is_leaving = self.is_leaving, True
        if self._supervisor is None or was_leaving:
            self._quit(reason)
            return
        self._stream.put(HostLeaves(reason))
        asyncio.get_running_loop().call_later(self._config.survival.drain_s, self._quit, reason)

    def _quit(self, reason: str) -> None:
        """End the membership, and tell the server."""
        self._stream.end(reason, HostLeaves(reason))
        self._end(reason)

    # ---- joining

    async def _connect(self, address: HostAddress) -> None:
        loop, dialer = asyncio.get_running_loop(), Dialer(address.server, address.port)
        dialing = run_in_thread(partial(dialer.connect, _CONNECT_S))
        try:
            await self._wait_for(dialing, None)
            connection, context = dialing.result(), client_context() if address.tls else None
            connection.setblocking(False)
            opening = loop.create_connection(
                lambda: self._stream,
                sock=connection,
                ssl=context,
                server_hostname=address.server if context is not None else None,
            )
            await asyncio.wait_for(opening, _CONNECT_S)
        except OSError as error:
            raise JoinFailedError(f"cannot reach the server at {address.server}:{address.port}: {error}") from error

    async def _start_mover(self, parts: HostParts, address: HostAddress) -> None:
        setup = MoverSetup(
            host=address.host,
            arena_bytes=parts.arena.bytes_total,
            device=self._computing.device.name,
            layout=self._computing.layout,
            transports=self._config.hosts.transports,
            listen=address.listen or self._stream.address,
            advertise=address.advertise,
            tiers=self._config.tiers,
            secret=address.mover_secret,
            encrypt=self._config.hosts.encrypt_kv,
            fingerprint=self._fingerprint,
        )
        silent_s = self._config.hosts.mover_silent_s
        self._mover = MoverSupervisor(setup, parts.arena.fd, self, silent_s=silent_s, tell=self._tell)
        self._mover.start()
        if not await self._wait_for(self._mover_up, _MOVER_S):
            raise JoinFailedError(f"the mover of {address.host} is not ready after {_MOVER_S:.0f} s, see above")

    async def _enter(self, parts: HostParts, address: HostAddress) -> None:
        """Send HostHello and wait until the server admits this host. Raises JoinFailedError or ConfigError if not."""
        generation, ready = self._mover_up.result()
        hello = HostHello(
            token=address.token,
            host=address.host,
            pid=os.getpid(),
            form=KVForm(identity=self._identity, layout=self._computing.layout),
            blocks_total=parts.blocks_total,
            workers_max=parts.workers_max,
            mover=ready,
            mover_generation=generation,
            arena_id=parts.arena_id,
            prices=device_prices(self._config, self._card, self._computing),
        )
        self._stream.put(hello)
        if not await self._wait_for(self._answer, _WELCOME_S):
            raise JoinFailedError(f"the server has not answered for {_WELCOME_S:.0f} s")
        answer = self._answer.result()
        if isinstance(answer, JoinRefused):
            why = f"the server refuses {address.host}: {answer.reason}"
            raise JoinFailedError(why, answer.again_s) if answer.again else ConfigError(why)
        self.kept = None  # from now on, the server decides about its blocks

    async def _wait_for(self, wanted: asyncio.Future[Any], limit_s: float | None) -> bool:
        """Return whether `wanted` is done within `limit_s` (None: no limit).

        Raises JoinFailedError if the membership ends first.
        """
        await asyncio.wait([wanted, self._over], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done() and self._over.done():
            raise JoinFailedError(f"could not join: {self._over.result()}")
        return wanted.done()

    def _start_workers(self, parts: HostParts) -> None:
        notices = Notices(tell=self._tell, ready=lambda: self._tell("every worker is ready"), failed=self._fail)
        self._supervisor = Supervisor(self, parts.setups, parts.descriptors, self._config.survival, notices)
        self._supervisor.start()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._quit(f"no worker can be kept alive: {reason}")

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    async def _stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.abandon()
            await self._supervisor.stop()
        if self._mover is not None:
            await self._mover.stop()

    # ---- messages of the server

    def _on_message(self, message: ToAgentMessage) -> None:
        match message:
            case ForWorker(worker=worker, payload=payload):
                link = self._links.get(worker)
                if link is not None:
                    link.send_payload(payload)
            case ForMover(generation=generation, order=order):
                if self._mover is not None:
                    self._mover.send(generation, order)
            case HostPing():
                self._stream.put(HostPong())
            case Resize(command=command):
                if self._supervisor is not None:
                    self._supervisor.resize(command)
            case Welcome() | JoinRefused():
                if not self._answer.done():
                    self._answer.set_result(message)
            case Dismissed(reason=reason, keep_as=keep_as):
                self._keep_as = keep_as
                self._end(reason)
            case LeaveCluster(reason=reason, restarts=restarts):
                if not self.is_leaving:  # a second call of `leave` would not wait
                    self.restarts = restarts
                    self._tell(f"leaving the cluster: {reason}")
                    self.leave(reason)

    # ---- events of this host's workers

    def add(self, link: WorkerLink) -> None:
        assert isinstance(link, WorkerProcess), f"{link.view.id} is a worker of this host"
        self._links[link.view.id] = link
        self._stream.put(WorkerStarting(link.view))

    def join(self, link: WorkerLink) -> None:
        self._stream.put(WorkerUp(link.view.id, link.pid, link.attention_backend))

    def lose(self, worker: WorkerId, reason: str) -> None:
        self._stream.put(WorkerDown(worker, reason))

    def retire(self, worker: WorkerId, reason: str) -> None:
        del self._links[worker]
        self._stream.put(WorkerDown(worker, reason, retired=True))

    def receive(self, worker: WorkerId, payload: bytes) -> WorkerMessage | None:
        message = self._decoder.decode(payload)
        if isinstance(message, OpaqueReport | OpaqueLayers):
            self._stream.put(FromWorker(worker, payload))
            return None
        return message

    # ---- events of this host's mover

    def mover_ready(self, host: HostId, generation: int, ready: MoverReady) -> None:
        if not self._mover_up.done():
            self._mover_up.set_result((generation, ready))
        else:
            self._stream.put(MoverUp(generation, ready))

    def mover_lost(self, host: HostId, generation: int, reason: str) -> None:
        """Report the loss to the server. Before the mover was ready for the first time, end the membership instead."""
        if self._mover_up.done():
            self._stream.put(MoverDown(generation, reason))
        else:
            self._end(f"the mover of {host} is lost: {reason}")

    def mover_reported(self, host: HostId, generation: int, event: MoverEvent) -> None:
        self._stream.put(FromMover(generation, event))
