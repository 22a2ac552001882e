"""The connection to the agent of another host, which forwards the messages of its workers and its mover."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, assert_never

import msgspec

from baton.core.copies import LayersDone
from baton.core.leaving import HostLeaving, RestartWorker
from baton.core.messages import RetireWorker, StartWorker, StepReport, WorkerCommand
from baton.core.types import HostId, WorkerId, WorkerView
from baton.move.ipc.frames import FRAME_BYTES_MAX
from baton.move.ipc.stream import FramedStream, watch
from baton.move.ipc.tls import ServerTls
from baton.serve.host.mover_supervisor import MoverListener
from baton.serve.live.driver import Driver
from baton.serve.live.waiting import Arrivals
from baton.serve.messages.hosting import (
    Dismissed,
    ForMover,
    ForWorker,
    FromAgentMessage,
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
    Welcome,
    WorkerDown,
    WorkerStarting,
    WorkerUp,
)
from baton.serve.messages.moving import MoverOrder
from baton.serve.messages.setup import FromWorkerMessage

_HELLO_S = 60.0
"""Deadline of an agent's hello, in seconds. It includes the start of the host's mover."""

_HELLO_BYTES_MAX = 64 * 1024
"""Maximum frame before the hello. This bounds the memory of a connection that has not presented a valid token."""

CONNECTIONS_MAX = 4096
"""Maximum connections on the port for agents, before and after they present a token."""
_HANDSHAKE_S = 10.0
"""Deadline of a TLS handshake, in seconds."""

_encoder = msgspec.msgpack.Encoder()


class Registry(MoverListener, Protocol):
    """Admits hosts, and receives their reports."""

    driver: Driver

    @property
    def joined(self) -> int:
        """Number of joined hosts."""
        ...

    def admit(self, host: JoinedHost, hello: HostHello) -> Welcome | JoinRefused: ...

    def changed(self) -> None:
        """Handle a worker of a host that became ready or was lost."""
        ...

    def connection_ended(self, host: JoinedHost, reason: str) -> None:
        """Handle the end of a connection, also if its host was rejected or never sent its hello."""
        ...


class RemoteWorker:
    """Implements `WorkerLink` for a worker of another host: commands go over the connection to that host."""

    def __init__(self, view: WorkerView, put: Callable[[ForWorker], None]) -> None:
        self.view = view
        self.state = "starting"
        self.pid = 0
        self.attention_backend = ""
        self._put = put

    def send(self, message: WorkerCommand) -> None:
        self._put(ForWorker(self.view.id, _encoder.encode(message)))


class JoinedHost:
    """The connection of an agent. It receives a hello, then reports of the host's workers and mover."""

    def __init__(self, registry: Registry, silent_s: float) -> None:
        self.id = HostId("")
        """Id of the host. Empty until the host is admitted."""
        self.stream: FramedStream[FromAgentMessage] = FramedStream(
            FromAgentMessage, on_message=self._on_message, on_end=self._ended
        )
        self.stream.frames.bytes_max = _HELLO_BYTES_MAX
        self._registry = registry
        self._deadline = asyncio.get_running_loop().call_later(
            _HELLO_S, self._give_up, f"it has sent no hello for {_HELLO_S:.0f} s"
        )
        self._watch = asyncio.create_task(watch(self.stream, silent_s, HostPing()))
        self.asked: set[WorkerId] = set()
        """Workers that scaling asked this host for, and that have neither started nor failed yet."""
        self.has_workers = False
        """The host has started a worker, so it can start others, even if that worker was lost."""
        self._workers: dict[WorkerId, RemoteWorker] = {}
        self._decoder = msgspec.msgpack.Decoder(FromWorkerMessage)

    @property
    def is_ready(self) -> bool:
        """True if no worker of the host is loading its model. False if the host has no worker."""
        return bool(self._workers) and all(worker.state != "starting" for worker in self._workers.values())

    def send(self, generation: int, order: MoverOrder) -> None:
        """Send an order to the host's mover, if it still has this generation."""
        self.stream.put(ForMover(generation, order))

    def resize(self, command: StartWorker | RetireWorker | RestartWorker) -> None:
        """Ask the host to start, end or restart a worker."""
        if isinstance(command, StartWorker):
            self.asked.add(command.worker)
        self.stream.put(Resize(command))

    def ask_to_leave(self, reason: str, *, restarts: bool = False) -> None:
        """Ask the agent to leave the cluster in order, and then to end. `restarts`: to start its program again."""
        self.stream.put(LeaveCluster(reason, restarts))

    def dismiss(self, reason: str, *, keep_as: str = "") -> None:
        """Close the connection. The agent may ask to join again, with its KV if `keep_as` names a table of it."""
        self.stream.end(reason, Dismissed(reason, keep_as))

    def _give_up(self, reason: str) -> None:
        """End the connection. If its TLS handshake has failed, report the end here, because the stream does not."""
        if self.stream.is_open:
            self.stream.end(reason)
        else:
            self._ended(reason)

    def _ended(self, reason: str) -> None:
        self._watch.cancel()
        self._deadline.cancel()
        self._registry.connection_ended(self, reason)

    def _on_message(self, message: FromAgentMessage) -> None:
        if isinstance(message, HostHello):
            self._on_hello(message)
            return
        if isinstance(message, HostPong):
            return
        if not self.id:
            self.stream.end("it sent another message before its hello", JoinRefused("send a hello first", again=False))
            return
        registry = self._registry
        match message:
            case FromWorker():
                self._on_worker_message(message)
            case WorkerStarting() | WorkerUp() | WorkerDown():
                self._note(message)
            case MoverUp(generation=generation, ready=ready):
                registry.mover_ready(self.id, generation, ready)
            case MoverDown(generation=generation, reason=reason):
                registry.mover_lost(self.id, generation, reason)
            case FromMover(generation=generation, event=event):
                registry.mover_reported(self.id, generation, event)
            case HostLeaves(reason=reason):
                has_prefixes = registry.driver.pools[self.id].view().blocks_cached > 0
                if registry.driver.cluster.coordinator.live_requests or has_prefixes:
                    registry.driver.tell(HostLeaving(self.id))
                else:
                    self.stream.end(reason)
            case _:
                assert_never(message)

    def _on_hello(self, hello: HostHello) -> None:
        answer = JoinRefused("this connection has a host already", again=False) if self.id else self._admit(hello)
        if isinstance(answer, JoinRefused):
            self.stream.end(answer.reason, answer)
        else:
            self.stream.put(answer)

    def _admit(self, hello: HostHello) -> Welcome | JoinRefused:
        answer = self._registry.admit(self, hello)
        if isinstance(answer, Welcome):
            self.id = hello.host
            self.stream.frames.bytes_max = FRAME_BYTES_MAX
            self._deadline.cancel()
        return answer

    def _on_worker_message(self, message: FromWorker) -> None:
        """Pass a worker's report to the driver. Ignore its other messages, which its own host has handled."""
        report = self._decoder.decode(message.payload)
        if (
            isinstance(report, StepReport | LayersDone)
            and report.worker == message.worker
            and message.worker in self._workers
        ):
            self._registry.driver.apply_report(report)

    def _note(self, message: WorkerStarting | WorkerUp | WorkerDown) -> None:
        driver = self._registry.driver
        match message:
            case WorkerStarting(view=view):
                view = msgspec.structs.replace(view, host=self.id)
                earlier = self._workers.get(view.id)
                if earlier is None and view.id in driver.links:
                    self.stream.end(f"its worker {view.id} has the same name as one of another host")
                    return
                if earlier is not None:
                    view = msgspec.structs.replace(view, role=earlier.view.role)
                self._workers[view.id] = driver.links[view.id] = RemoteWorker(view, self.stream.put)
                self.has_workers = True
                driver.arrivals.without_workers.discard(self.id)
            case WorkerUp(worker=worker, pid=pid, attention_backend=attention) if worker in self._workers:
                link = self._workers[worker]
                link.state, link.pid, link.attention_backend = "ready", pid, attention
                self.asked.discard(worker)
                driver.join(link)
                self._registry.changed()
            case WorkerDown(worker=worker, reason=reason, retired=retired) if worker in self._workers:
                was_ready, self._workers[worker].state = self._workers[worker].state == "ready", "lost"
                if was_ready or retired:
                    driver.lose(worker, reason)
                if retired:
                    del self._workers[worker], driver.links[worker]
                    self.asked.discard(worker)
                self._registry.changed()
            case _:
                pass  # the host has not announced this worker


@dataclass(frozen=True, slots=True)
class AgentReceiver:
    """Implements `ConnectionReceiver` for the connections of agents."""

    registry: Registry
    silent_s: float
    arrivals: Arrivals
    tls: ServerTls | None

    def receive(self, connection: socket.socket, address: str) -> Coroutine[None, None, None] | None:
        """Return a coroutine that opens an accepted connection. None: there are too many, so it was closed."""
        if len(self.arrivals.unauthenticated) + self.registry.joined >= CONNECTIONS_MAX:
            connection.close()
            return None
        return self._open(connection)

    async def _open(self, connection: socket.socket) -> None:
        tls = None if self.tls is None else self.tls.context
        with contextlib.suppress(OSError):  # the peer has gone, or does not complete the handshake
            await asyncio.get_running_loop().connect_accepted_socket(
                self._stream, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S
            )

    def _stream(self) -> asyncio.Protocol:
        host = JoinedHost(self.registry, self.silent_s)
        self.arrivals.unauthenticated.add(host)
        return host.stream
