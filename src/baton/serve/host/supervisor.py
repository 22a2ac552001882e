"""Keep the worker processes of one host alive: start, watch, kill if hung, restart with back-off or give up."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.compute.models.dtype import Precision
from baton.core.config import SurvivalConfig
from baton.core.leaving import RestartWorker
from baton.core.messages import RetireWorker, Shutdown, StartWorker, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import WorkerId
from baton.move.backoff import Backoff
from baton.move.clock import now_s
from baton.move.cores import own_cores
from baton.move.weights_file import create_weights_file
from baton.serve.host.child_process import WorkerProcess
from baton.serve.host.tasks import spawn
from baton.serve.host.worker_link import WorkerListener
from baton.serve.messages.setup import Ping, Pong, WorkerSetup

_SHUTDOWN_S = 3.0
"""How long a worker may take to end after `Shutdown`, before it is killed."""
_PING_S = 2.0
"""Maximum pause between two pings of a worker."""
_BACKOFF = Backoff(0.05, 3.2)


@dataclass(slots=True)
class _Slot:
    """One worker: its setup, its current process, and the times of death of its earlier processes."""

    setup: WorkerSetup
    process: WorkerProcess | None = None
    deaths_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    quiet_s: float = 0.0
    """Time without a message from the process, without the time in which this process did not run itself."""
    failure: str = ""
    has_load_error: bool = False
    """The process reported that it cannot load the model. It is not restarted: a new process would fail too."""
    given_up: bool = False
    is_added: bool = False
    """Started by the scaling policy. If it is given up, it is removed, and scaling asks for a worker of a new name."""
    retiring: bool = False
    """Told to end by the scaling policy: its end is no failure, and it is not restarted."""
    is_restarting: bool = False
    """Told to end by a rolling restart: its end is no failure, and it starts again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """Callbacks of the supervisor."""

    tell: Callable[[str], None]
    """Gets lines for the terminal."""
    ready: Callable[[], None]
    """Called when every worker that is not given up has loaded its model."""
    failed: Callable[[str], None]
    """Called when every worker is given up, with the reason of the last one."""


class Supervisor:
    """Runs two tasks for each worker: one starts and restarts its process, one kills a process that does not answer."""

    def __init__(
        self,
        listener: WorkerListener,
        setups: Sequence[WorkerSetup],
        descriptors: Sequence[int],
        survival: SurvivalConfig,
        notices: Notices,
        cores: Sequence[int] | None = None,
    ) -> None:
        """`descriptors`: those that every worker gets. `cores`: those for added workers. None: all of this process."""
        self._cores = own_cores() if cores is None else cores
        self._listener = listener
        self._slots: dict[WorkerId, _Slot] = {setup.view.id: _Slot(setup) for setup in setups}
        self._like = setups[0]
        """Template for workers that scaling adds. It stays when scaling has ended every worker."""
        self._descriptors = descriptors
        self._weights_fds: dict[Precision, int | None] = {}
        """A file for the packed weights of each precision. None: this system has no such files."""
        self._survival = survival
        self._notices = notices
        self._stopping = False
        self._supervising: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start every worker in the background. `ready` is called when all of them have loaded."""
        for slot in self._slots.values():
            self._start(slot)

    def _start(self, slot: _Slot) -> None:
        slot.process = self._make(slot)
        self._listener.add(slot.process)
        for tasks, run in ((self._supervising, self._supervise), (self._watchers, self._watch)):
            task = spawn(run(slot), self._notices.tell)
            tasks.add(task)
            task.add_done_callback(tasks.discard)  # else the set grows with each worker that scaling adds

    def resize(self, command: StartWorker | RetireWorker | RestartWorker) -> None:
        """Carry out a decision about the fleet: start a worker like the others, end an idle one, or restart one."""
        match command:
            case StartWorker(worker=worker, role=role):
                kind = role if self._like.phases else self._like.view.kind
                view = msgspec.structs.replace(self._like.view, id=worker, role=role, kind=kind)
                setup = msgspec.structs.replace(self._like, view=view, cores=self._free_cores(), guest_cores=())
                slot = _Slot(setup, is_added=True)
                self._slots[worker] = slot
                self._notices.tell(f"{worker} is started: scaling asks for more {role}")
                self._start(slot)
            case RetireWorker(worker=worker):
                slot = self._slots.get(worker)
                if slot is not None and slot.process is not None:
                    slot.retiring = True
                    slot.process.send(Shutdown())
            case RestartWorker(worker=worker):
                slot = self._slots.get(worker)
                if slot is not None and slot.process is not None and slot.process.state == "ready":
                    slot.is_restarting = True
                    slot.process.send(Shutdown())
            case _:
                assert_never(command)

    def _free_cores(self) -> tuple[int, ...]:
        """Return cores for a new worker to pin to. Empty: too few cores are free, or workers here are not pinned."""
        taken = {core for slot in self._slots.values() for core in slot.setup.cores}
        free, count = [core for core in self._cores if core not in taken], len(self._like.cores)
        return tuple(free[:count]) if len(free) >= count else ()

    def abandon(self) -> None:
        """Kill every worker at once: their results are not needed any more. `stop` waits until they have ended."""
        self._stopping = True
        for slot in self._slots.values():
            if slot.process is not None:
                slot.process.kill()

    async def stop(self) -> None:
        """Shut down every worker; kill those that do not end in time. No process is left when this returns."""
        self._stopping = True
        for slot in self._slots.values():
            if slot.process is not None and slot.process.state == "ready":
                slot.process.send(Shutdown())
            elif slot.process is not None:
                slot.process.kill()  # it reads no message before it has loaded the model
        supervising, late = list(self._supervising), set[asyncio.Task[None]]()
        if supervising:
            _done, late = await asyncio.wait(supervising, timeout=_SHUTDOWN_S)
        for slot in self._slots.values():
            if late and slot.process is not None:
                slot.process.kill()
        if supervising:
            await asyncio.wait(supervising)
        for task in list(self._watchers):
            task.cancel()
        for descriptor in self._weights_fds.values():
            if descriptor is not None:
                os.close(descriptor)
        self._weights_fds.clear()

    def _make(self, slot: _Slot) -> WorkerProcess:
        view = slot.setup.view
        return WorkerProcess(
            view, on_message=lambda payload: self._on_message(slot, payload), on_output=self._notices.tell
        )

    async def _supervise(self, slot: _Slot) -> None:
        """Run the processes of one worker, one after the other."""
        worker = slot.setup.view.id
        while not self._stopping:
            process = slot.process
            assert process is not None
            slot.quiet_s, slot.failure, slot.has_load_error = 0.0, "", False
            ended = await self._run(slot, process)
            if self._stopping:
                return
            process.state = "lost"
            if slot.retiring:
                self._notices.tell(f"{worker} is retired: scaling asks for fewer")
                self._forget(slot, "retired")
                return
            is_wanted, slot.is_restarting = slot.is_restarting, False
            reason = "it restarts" if is_wanted else slot.failure or ended
            self._notices.tell(f"{worker} restarts" if is_wanted else f"{worker} is lost: {reason}")
            self._listener.lose(worker, reason.splitlines()[0])
            if not is_wanted and not await self._may_restart(slot, reason):
                if slot.given_up and slot.is_added:
                    self._forget(slot, reason.splitlines()[0])
                return
            role = process.view.role
            slot.process = self._make(slot)
            slot.process.view = msgspec.structs.replace(slot.setup.view, role=role)
            self._listener.add(slot.process)

    def _forget(self, slot: _Slot, reason: str) -> None:
        """Remove a worker for good. Its name is not used again."""
        worker = slot.setup.view.id
        self._listener.retire(worker, reason)
        slot.given_up = True
        del self._slots[worker]

    async def _run(self, slot: _Slot, process: WorkerProcess) -> str:
        """Run one process to its end. Return a description of the end."""
        try:
            await process.begin(slot.setup, (*self._descriptors, *self._weights_files(slot.setup.precision)))
        except OSError as error:
            return f"{slot.setup.view.id} could not be started: {error}"
        if self._stopping:
            process.send(Shutdown())
        return await process.wait()

    def _weights_files(self, precision: Precision) -> tuple[int, ...]:
        """Return the descriptor of the file for these weights, if this system has such files."""
        if precision not in self._weights_fds:
            self._weights_fds[precision] = create_weights_file()
        descriptor = self._weights_fds[precision]
        return () if descriptor is None else (descriptor,)

    async def _may_restart(self, slot: _Slot, reason: str) -> bool:
        """Wait for the back-off that recent deaths require. Return False, and give up, if there were too many."""
        moment_s, survival = now_s(), self._survival
        slot.deaths_s.append(moment_s)
        recent = sum(moment_s - death_s < survival.restart_window_s for death_s in slot.deaths_s)
        if recent > survival.restarts_max or (slot.has_load_error and recent > 1):
            self._notices.tell(
                f"{slot.setup.view.id} died {recent} times within {survival.restart_window_s:.0f} s: given up"
            )
            slot.given_up = True
            if not slot.is_added:  # for an added worker, scaling asks for another one on any host
                self._notify(reason)
            return False
        await asyncio.sleep(_BACKOFF.pause_s(recent))
        return not self._stopping

    def _notify(self, reason: str = "") -> None:
        """Call `ready` if all remaining workers are ready, or `failed` if none remains."""
        left = [slot.process for slot in self._slots.values() if not slot.given_up]
        if not left:
            self._notices.failed(reason)
        elif all(process is not None and process.state == "ready" for process in left):
            self._notices.ready()

    async def _watch(self, slot: _Slot) -> None:
        """Kill a worker that does not answer, so that its requests can continue on another one.

        A pause of the whole machine, or a restored checkpoint, counts as one round of the watch.
        """
        survival = self._survival
        round_s = min(_PING_S, survival.silent_s / 4)
        while not slot.given_up:
            await asyncio.sleep(round_s)
            process = slot.process
            if process is None or process.state == "lost":
                continue
            limit_s = survival.silent_s if process.state == "ready" else survival.start_s
            slot.quiet_s += round_s
            if slot.quiet_s > limit_s:
                slot.failure = f"{slot.setup.view.id} has not answered for {limit_s:.0f} s and was killed"
                process.kill()
            elif process.state == "ready":
                process.send(Ping())

    def _on_message(self, slot: _Slot, payload: bytes) -> None:
        slot.quiet_s = 0.0
        process = slot.process
        assert process is not None
        match self._listener.receive(slot.setup.view.id, payload):
            case WorkerReady(attention_backend=attention):
                process.state, process.attention_backend = "ready", attention
                self._listener.join(process)
                if slot.deaths_s:
                    self._notices.tell(f"{slot.setup.view.id} is back")
                self._notify()
            case WorkerProgress(worker=worker, text=text):
                self._notices.tell(f"{worker}: {text}")
            case WorkerFailed(reason=reason):
                slot.failure, slot.has_load_error = reason, True
            case Pong() | None:
                pass
