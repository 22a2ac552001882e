"""Keep the mover of one host alive: start it, watch it, kill it if it hangs, restart it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from baton.core.types import HostId
from baton.move.backoff import Backoff
from baton.move.clock import now_s
from baton.serve.host.child_process import ChildProcess
from baton.serve.host.tasks import spawn
from baton.serve.messages.moving import (
    FromMoverMessage,
    MoverEvent,
    MoverFailed,
    MoverOrder,
    MoverPong,
    MoverReady,
    MoverSetup,
)
from baton.serve.messages.setup import Ping

_BACKOFF = Backoff(0.05, 6.4)
"""Pauses before restarts, in seconds. Restarts are unlimited, because a host without a mover still serves."""
_QUICK_DEATH_S = 10.0
"""A mover that dies within this time counts as a failed start."""
_START_S = 30.0
"""A mover that is not ready after this time is killed."""


class MoverListener(Protocol):
    """Receives the events of a host's mover. Each start of a mover process is a new generation."""

    def mover_ready(self, host: HostId, generation: int, ready: MoverReady) -> None:
        """Note that the mover accepts orders, which must name this generation."""
        ...

    def mover_lost(self, host: HostId, generation: int, reason: str) -> None:
        """Note that the mover is dead: this generation does not read or write the arena any more."""
        ...

    def mover_reported(self, host: HostId, generation: int, event: MoverEvent) -> None: ...


class MoverSupervisor:
    """Runs a host's mover process and restarts it when it ends. Each process is a new generation."""

    def __init__(
        self, setup: MoverSetup, arena_fd: int, listener: MoverListener, *, silent_s: float, tell: Callable[[str], None]
    ) -> None:
        self.generation = 0
        self._setup = setup
        self._arena_fd = arena_fd
        self._listener = listener
        self._silent_s = silent_s
        self._tell = tell
        self._process: ChildProcess | None = None
        self._is_ready = False
        self._quiet_s = 0.0
        """Time without a message of the mover, without the time in which this process did not run itself."""
        self._failure = ""
        self._decoder = msgspec.msgpack.Decoder(FromMoverMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the running mover. 0: no mover runs."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the mover in the background. The listener is told when it is ready."""
        self._tasks = [spawn(work, self._tell) for work in (self._supervise(), self._watch())]

    def send(self, generation: int, order: MoverOrder) -> None:
        """Send an order to the mover of `generation`. If that mover is lost, drop the order: its transfer has ended."""
        if self._process is not None and generation == self.generation:
            self._process.send_payload(self._encoder.encode(order))

    async def stop(self) -> None:
        """End the mover. No process is left when this returns."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
        supervising, watching = self._tasks
        watching.cancel()
        await asyncio.wait({supervising})

    async def _supervise(self) -> None:
        quick_deaths = 0
        while not self._stopped.is_set():
            self.generation += 1
            began_s, self._quiet_s = now_s(), 0.0
            self._is_ready, self._failure = False, ""
            ended = await self._run(self.generation)
            self._process = None
            if self._stopped.is_set():
                return
            reason = self._failure or ended
            self._tell(f"the mover of {self._setup.host} is lost: {reason}")
            self._listener.mover_lost(self._setup.host, self.generation, reason.splitlines()[0])
            quick_deaths = 0 if now_s() - began_s > _QUICK_DEATH_S else quick_deaths + 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _BACKOFF.pause_s(quick_deaths + 1))

    async def _run(self, generation: int) -> str:
        """Run one process to its end. Return a description of the end."""
        process = ChildProcess(
            f"the mover of {self._setup.host}",
            "baton.serve.host.mover",
            on_message=lambda payload: self._on_message(generation, payload),
            on_output=self._tell,
        )
        try:
            await process.start(self._encoder.encode(self._setup), [self._arena_fd], threads=1)
        except OSError as error:
            return f"it could not be started: {error}"
        self._process = process
        if self._stopped.is_set():
            process.kill()
        return await process.wait()

    async def _watch(self) -> None:
        """Kill a mover that does not answer, because the blocks of its transfers stay reserved as long as it lives."""
        round_s = self._silent_s / 4
        while True:
            await asyncio.sleep(round_s)
            if self._process is None:
                continue
            limit_s = self._silent_s if self._is_ready else _START_S
            self._quiet_s += round_s
            if self._quiet_s > limit_s:
                self._failure = f"it has not answered for {limit_s:.0f} s and was killed"
                self._process.kill()
            elif self._is_ready:
                self._process.send_payload(self._encoder.encode(Ping()))

    def _on_message(self, generation: int, payload: bytes) -> None:
        self._quiet_s = 0.0
        host = self._setup.host
        match self._decoder.decode(payload):
            case MoverReady() as ready:
                self._is_ready = True
                self._listener.mover_ready(host, generation, ready)
            case MoverFailed(reason=reason):
                self._failure = reason
            case MoverPong():
                pass
            case event:
                self._listener.mover_reported(host, generation, event)
