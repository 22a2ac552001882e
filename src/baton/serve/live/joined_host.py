"""Another host of the cluster, as the server holds it: the connection to its agent, its workers, its mover."""

from __future__ import annotations

import asyncio
from typing import Protocol, assert_never

import msgspec

from baton.core.copies import LayersDone
from baton.core.messages import RetireWorker, StartWorker, StepReport
from baton.core.types import HostId, WorkerId
from baton.move.ipc.frames import FRAME_BYTES_MAX
from baton.move.ipc.stream import FramedStream, watch
from baton.serve.host.mover_keeper import MoverListener
from baton.serve.live.driver import Driver
from baton.serve.live.remote_worker import RemoteWorker
from baton.serve.messages.hosting import (
    Dismissed,
    ForMover,
    FromAgentMessage,
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
    Welcome,
    WorkerDown,
    WorkerStarting,
    WorkerUp,
)
from baton.serve.messages.moving import MoverOrder
from baton.serve.messages.setup import FromWorkerMessage

_HELLO_S = 60.0
"""An agent connects before its mover is up; then it says who it is."""

_HELLO_BYTES_MAX = 64 * 1024
"""Until then the port is open to strangers, and this is what each of them can make us hold."""


class Registry(MoverListener, Protocol):
    """Who decides which host belongs to the cluster."""

    driver: Driver

    def admit(self, host: JoinedHost, hello: HostHello) -> Welcome | Refused: ...

    def changed(self) -> None:
        """A worker of some host has become ready."""
        ...

    def gone(self, host: JoinedHost, reason: str) -> None:
        """A connection has ended. It may have been refused, or never have said who it is."""
        ...


class JoinedHost:
    """One connection of an agent: first it says who it is, then it speaks for its workers and its mover."""

    def __init__(self, registry: Registry, silent_s: float) -> None:
        self.id = HostId("")
        """Empty until it is welcome."""
        self.stream: FramedStream[FromAgentMessage] = FramedStream(
            FromAgentMessage, heard=self._hear, ended=self._ended
        )
        self.stream.frames.bytes_max = _HELLO_BYTES_MAX
        self._registry = registry
        self._deadline = asyncio.get_running_loop().call_later(
            _HELLO_S, self.stream.end, f"it has not said who it is for {_HELLO_S:.0f} s"
        )
        self._watch = asyncio.create_task(watch(self.stream, silent_s, HostPing()))
        self.asked: set[WorkerId] = set()
        """Workers that scaling wants here, and that have neither come nor been given up."""
        self.has_workers = False
        """It has named a worker, whatever has become of that: it can start others."""
        self._workers: dict[WorkerId, RemoteWorker] = {}
        self._decoder = msgspec.msgpack.Decoder(FromWorkerMessage)

    @property
    def is_ready(self) -> bool:
        """Every worker that it has named has loaded its model, or was given up."""
        return bool(self._workers) and all(worker.state != "starting" for worker in self._workers.values())

    @property
    def workers(self) -> int:
        """How many it has, or will have once what it was asked for has come."""
        return len(self._workers.keys() | self.asked)

    def send(self, generation: int, order: MoverOrder) -> None:
        """See `Orders.send`."""
        self.stream.put(ForMover(generation, order))

    def resize(self, command: StartWorker | RetireWorker) -> None:
        """Let it start a worker more, or end one."""
        if isinstance(command, StartWorker):
            self.asked.add(command.worker)
        self.stream.put(Resize(command))

    def dismiss(self, reason: str) -> None:
        """Hang up. The agent may ask to join anew."""
        self.stream.end(reason, Dismissed(reason))

    def _ended(self, reason: str) -> None:
        self._watch.cancel()
        self._deadline.cancel()
        self._registry.gone(self, reason)

    def _hear(self, message: FromAgentMessage) -> None:
        if isinstance(message, HostHello):
            self._greet(message)
            return
        if isinstance(message, HostPong):
            return
        if not self.id:
            self.stream.end("it spoke before it said who it is", Refused("say who you are first", again=False))
            return
        registry = self._registry
        match message:
            case FromWorker():
                self._hear_worker(message)
            case WorkerStarting() | WorkerUp() | WorkerDown():
                self._note(message)
            case MoverUp(generation=generation, ready=ready):
                registry.mover_ready(self.id, generation, ready)
            case MoverDown(generation=generation, reason=reason):
                registry.mover_lost(self.id, generation, reason)
            case FromMover(generation=generation, news=news):
                registry.mover_said(self.id, generation, news)
            case HostLeaves(reason=reason):
                self.stream.end(reason)
            case _:
                assert_never(message)

    def _greet(self, hello: HostHello) -> None:
        answer = Refused("this connection has a host already", again=False) if self.id else self._admit(hello)
        if isinstance(answer, Refused):
            self.stream.end(answer.reason, answer)
        else:
            self.stream.put(answer)

    def _admit(self, hello: HostHello) -> Welcome | Refused:
        answer = self._registry.admit(self, hello)
        if isinstance(answer, Welcome):
            self.id = hello.host
            self.stream.frames.bytes_max = FRAME_BYTES_MAX
            self._deadline.cancel()
        return answer

    def _hear_worker(self, message: FromWorker) -> None:
        """Take in a report. Whatever else a worker says is its own host's to act on."""
        report = self._decoder.decode(message.payload)
        if (
            isinstance(report, StepReport | LayersDone)
            and report.worker == message.worker
            and message.worker in self._workers
        ):
            self._registry.driver.hear(report)

    def _note(self, message: WorkerStarting | WorkerUp | WorkerDown) -> None:
        driver = self._registry.driver
        match message:
            case WorkerStarting(view=view):
                view = msgspec.structs.replace(view, host=self.id)
                earlier = self._workers.get(view.id)
                if earlier is None and view.id in driver.links:
                    self.stream.end(f"its worker {view.id} is called like one of another host")
                    return
                if earlier is not None:
                    view = msgspec.structs.replace(view, role=earlier.view.role)
                self._workers[view.id] = driver.links[view.id] = RemoteWorker(view, self.stream.put)
                self.has_workers = True
            case WorkerUp(worker=worker, pid=pid) if worker in self._workers:
                link = self._workers[worker]
                link.state, link.pid = "ready", pid
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
                pass  # of a worker that it has not named
