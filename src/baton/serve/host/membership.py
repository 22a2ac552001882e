"""One stay of a host in a cluster: from its word of welcome to the end of its last process.

Each stay has an arena of its own, so that nothing of an earlier one can be read or written by mistake.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
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
from baton.move.ipc.stream import FramedStream, watch
from baton.serve.host.ask import NotNowError
from baton.serve.host.build import Computing, HostParts, build_host, device_prices
from baton.serve.host.mover_keeper import MoverKeeper
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.host.tasks import prefault
from baton.serve.host.tier_opening import fingerprint_of
from baton.serve.host.worker_link import WorkerLink, WorkerNews
from baton.serve.host.worker_process import WorkerProcess
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
    MoverDown,
    MoverUp,
    Refused,
    Resize,
    ToAgentMessage,
    Welcome,
    WorkerDown,
    WorkerStarting,
    WorkerUp,
)
from baton.serve.messages.moving import MoverNews, MoverReady, MoverSetup
from baton.serve.messages.setup import Pong

_CONNECT_S = 10.0
_MOVER_S = 30.0
_WELCOME_S = 10.0


class PassedReport(msgspec.Struct, frozen=True, tag=StepReport.__name__):
    """A step's report, of which an agent reads nothing: it goes on to the server as it came."""


class PassedLayers(msgspec.Struct, frozen=True, tag=LayersDone.__name__):
    """How far a step is: goes on to the server too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host stands in the cluster, and how others reach it."""

    host: HostId
    server: str
    """Address of the server."""
    port: int
    token: str
    listen: str
    """Where the mover listens. Empty: at the address by which this host reaches the server."""
    advertise: str
    """Where others reach it. Empty: there."""


class Membership:
    """Implements `WorkerListener` and `MoverListener` by passing on what it hears over the connection to the server."""

    def __init__(self, config: Config, card: ModelCard, computing: Computing, tell: Callable[[str], None]) -> None:
        self._config = config
        self._card = card
        self._computing = computing
        self._identity = kv_identity(card)
        self._tell = tell
        self._stream = FramedStream[ToAgentMessage](ToAgentMessage, heard=self._hear_server, ended=self._end)
        self._decoder = msgspec.msgpack.Decoder(
            PassedReport | PassedLayers | WorkerReady | WorkerProgress | WorkerFailed | Pong
        )
        self._links: dict[WorkerId, WorkerProcess] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._mover_up: asyncio.Future[tuple[int, MoverReady]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Welcome | Refused] = asyncio.get_running_loop().create_future()
        self._keeper: MoverKeeper | None = None
        self._supervisor: Supervisor | None = None
        self.failure = ""
        """Why no worker of this host can be kept alive, if so."""

    async def stay(self, place: Place) -> str:
        """Join, serve, and return why it is over; no process is left then.

        Raises NotNowError where it could not join and may try again, ConfigError where that would not help.
        """
        parts = build_host(self._config, self._card, self._computing, place.host, f"{place.host}.")
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._connect(place)
            tasks.append(asyncio.create_task(watch(self._stream, self._config.hosts.silent_s, None)))
            await self._start_mover(parts, place)
            await self._enter(parts, place)
            self._start_workers(parts)
            tasks.append(asyncio.create_task(prefault(parts.arena)))
            return await self._over
        finally:
            for task in tasks:
                task.cancel()
            self._stream.end("it is over")
            await self._stop()
            parts.arena.close()

    def leave(self, reason: str) -> None:
        """End the stay, and tell the server."""
        self._stream.end(reason, HostLeaves(reason))
        self._end(reason)

    # ---- joining

    async def _connect(self, place: Place) -> None:
        try:
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.create_connection(lambda: self._stream, place.server, place.port), _CONNECT_S)
        except OSError as error:
            raise NotNowError(f"cannot reach the server at {place.server}:{place.port}: {error}") from error

    async def _start_mover(self, parts: HostParts, place: Place) -> None:
        setup = MoverSetup(
            host=place.host,
            arena_bytes=parts.arena.bytes_total,
            device=self._computing.device.name,
            layout=self._computing.layout,
            transports=self._config.hosts.transports,
            listen=place.listen or self._stream.address,
            advertise=place.advertise,
            tiers=self._config.tiers,
            fingerprint=fingerprint_of(self._identity, self._computing.layout, self._computing.dtype),
        )
        silent_s = self._config.hosts.mover_silent_s
        self._keeper = MoverKeeper(setup, parts.arena.fd, self, silent_s=silent_s, tell=self._tell)
        self._keeper.start()
        if not await self._first(self._mover_up, _MOVER_S):
            raise NotNowError(f"the mover of {place.host} is not ready after {_MOVER_S:.0f} s, see above")

    async def _enter(self, parts: HostParts, place: Place) -> None:
        """Say who we are, and hear whether that is welcome."""
        generation, ready = self._mover_up.result()
        hello = HostHello(
            token=place.token,
            host=place.host,
            pid=os.getpid(),
            form=KVForm(identity=self._identity, layout=self._computing.layout),
            blocks_total=parts.blocks_total,
            mover=ready,
            mover_generation=generation,
            prices=device_prices(self._config, self._card, self._computing),
        )
        self._stream.put(hello)
        if not await self._first(self._answer, _WELCOME_S):
            raise NotNowError(f"the server has not answered for {_WELCOME_S:.0f} s")
        answer = self._answer.result()
        if isinstance(answer, Refused):
            raise (NotNowError if answer.again else ConfigError)(f"the server refuses {place.host}: {answer.reason}")

    async def _first(self, wanted: asyncio.Future[Any], limit_s: float) -> bool:
        """Wait for something, but not longer than the connection lasts. Raises NotNowError where that ends first."""
        await asyncio.wait([wanted, self._over], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done() and self._over.done():
            raise NotNowError(f"could not join: {self._over.result()}")
        return wanted.done()

    def _start_workers(self, parts: HostParts) -> None:
        notices = Notices(tell=self._tell, ready=lambda: self._tell("every worker is ready"), failed=self._fail)
        self._supervisor = Supervisor(self, parts.setups, parts.arena.fd, self._config.survival, notices)
        self._supervisor.start()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.leave(f"no worker can be kept alive: {reason}")

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)

    async def _stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.abandon()
            await self._supervisor.stop()
        if self._keeper is not None:
            await self._keeper.stop()

    # ---- what the server says

    def _hear_server(self, message: ToAgentMessage) -> None:
        match message:
            case ForWorker(worker=worker, payload=payload):
                link = self._links.get(worker)
                if link is not None:
                    link.pass_on(payload)
            case ForMover(generation=generation, order=order):
                if self._keeper is not None:
                    self._keeper.send(generation, order)
            case HostPing():
                self._stream.put(HostPong())
            case Resize(command=command):
                if self._supervisor is not None:
                    self._supervisor.resize(command)
            case Welcome() | Refused():
                if not self._answer.done():
                    self._answer.set_result(message)
            case Dismissed(reason=reason):
                self._end(reason)

    # ---- what our workers say

    def add(self, link: WorkerLink) -> None:
        """See `WorkerListener.add`."""
        assert isinstance(link, WorkerProcess), f"{link.view.id} is a worker of this host"
        self._links[link.view.id] = link
        self._stream.put(WorkerStarting(link.view))

    def join(self, link: WorkerLink) -> None:
        """See `WorkerListener.join`."""
        self._stream.put(WorkerUp(link.view.id, link.pid))

    def lose(self, worker: WorkerId, reason: str) -> None:
        """See `WorkerListener.lose`."""
        self._stream.put(WorkerDown(worker, reason))

    def retire(self, worker: WorkerId, reason: str) -> None:
        """See `WorkerListener.retire`."""
        del self._links[worker]
        self._stream.put(WorkerDown(worker, reason, retired=True))

    def hear(self, worker: WorkerId, payload: bytes) -> WorkerNews | None:
        """See `WorkerListener.hear`."""
        message = self._decoder.decode(payload)
        if isinstance(message, PassedReport | PassedLayers):
            self._stream.put(FromWorker(worker, payload))
            return None
        return message

    # ---- what our mover says

    def mover_ready(self, host: HostId, generation: int, ready: MoverReady) -> None:
        """See `MoverListener.mover_ready`."""
        if not self._mover_up.done():
            self._mover_up.set_result((generation, ready))
        else:
            self._stream.put(MoverUp(generation, ready))

    def mover_lost(self, host: HostId, generation: int, reason: str) -> None:
        """See `MoverListener.mover_lost`. A server that has not heard of a mover hears nothing of its end."""
        if self._mover_up.done():
            self._stream.put(MoverDown(generation, reason))
        else:
            self._end(f"the mover of {host} is lost: {reason}")

    def mover_said(self, host: HostId, generation: int, news: MoverNews) -> None:
        """See `MoverListener.mover_said`."""
        self._stream.put(FromMover(generation, news))
