"""Keeps the worker processes of one host alive: start, watch, kill what hangs, start again, give up in time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.core.config import SurvivalConfig
from baton.core.messages import RetireWorker, Shutdown, StartWorker, WorkerFailed, WorkerProgress, WorkerReady
from baton.core.types import WorkerId
from baton.move.clock import now_s
from baton.serve.host.tasks import spawn
from baton.serve.host.worker_link import WorkerListener
from baton.serve.host.worker_process import WorkerProcess
from baton.serve.messages.setup import Ping, Pong, WorkerSetup

_SHUTDOWN_S = 3.0
"""How long a worker may take to end after it was told to, before it is killed."""


@dataclass(slots=True)
class _Post:
    """One worker's place: the process that fills it now, and when the earlier ones died."""

    setup: WorkerSetup
    process: WorkerProcess | None = None
    deaths_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    heard_s: float = 0.0
    failure: str = ""
    cannot_load: bool = False
    """The process said itself that it cannot go on, so that another one would not either."""
    given_up: bool = False
    is_added: bool = False
    """Scaling has asked for it. Once it is given up it is forgotten: scaling asks for another one, by another name."""
    retiring: bool = False
    """Scaling wants it no more: its end is no death, and no other follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """Whom the supervisor tells what."""

    tell: Callable[[str], None]
    """A line for the person at the terminal."""
    ready: Callable[[], None]
    """Every worker that is not given up has loaded its model."""
    failed: Callable[[str], None]
    """Every worker is given up, and why the last one was."""


class Supervisor:
    """Runs two tasks per worker: one keeps its process alive, one watches that it answers."""

    def __init__(
        self,
        audience: WorkerListener,
        setups: Sequence[WorkerSetup],
        arena_fd: int,
        survival: SurvivalConfig,
        notices: Notices,
    ) -> None:
        self._audience = audience
        self._posts: dict[WorkerId, _Post] = {setup.view.id: _Post(setup) for setup in setups}
        self._like = setups[0]
        """What is added is like it, though scaling may have ended every worker here."""
        self._arena_fd = arena_fd
        self._survival = survival
        self._notices = notices
        self._stopping = False
        self._keepers: set[asyncio.Task[None]] = set()
        self._watchers: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start every worker. Returns at once; `ready` is called when all of them have loaded."""
        for post in self._posts.values():
            self._man(post)

    def _man(self, post: _Post) -> None:
        post.process = self._make(post)
        self._audience.add(post.process)
        for tasks, run in ((self._keepers, self._keep), (self._watchers, self._watch)):
            task = spawn(run(post), self._notices.tell)
            tasks.add(task)
            task.add_done_callback(tasks.discard)  # workers come and go for as long as the server lives

    def resize(self, command: StartWorker | RetireWorker) -> None:
        """Do what a scaling policy asks: start a worker like the others, or end one that has nothing to do."""
        match command:
            case StartWorker(worker=worker, role=role):
                view = msgspec.structs.replace(self._like.view, id=worker, role=role)
                post = _Post(msgspec.structs.replace(self._like, view=view), is_added=True)
                self._posts[worker] = post
                self._notices.tell(f"{worker} is started: scaling asks for more {role}")
                self._man(post)
            case RetireWorker(worker=worker):
                post = self._posts.get(worker)
                if post is not None and post.process is not None:
                    post.retiring = True
                    post.process.send(Shutdown())
            case _:
                assert_never(command)

    def abandon(self) -> None:
        """Kill every worker: what they compute is of no use to anybody any more. `stop` waits for their end."""
        self._stopping = True
        for post in self._posts.values():
            if post.process is not None:
                post.process.kill()

    async def stop(self) -> None:
        """End every worker, politely first. No process is left when this returns."""
        self._stopping = True
        for post in self._posts.values():
            if post.process is not None and post.process.state == "ready":
                post.process.send(Shutdown())
            elif post.process is not None:
                post.process.kill()  # it is loading, and would not listen before it has
        keepers, late = list(self._keepers), set[asyncio.Task[None]]()
        if keepers:
            _done, late = await asyncio.wait(keepers, timeout=_SHUTDOWN_S)
        for post in self._posts.values():
            if late and post.process is not None:
                post.process.kill()
        if keepers:
            await asyncio.wait(keepers)
        for task in list(self._watchers):
            task.cancel()

    def _make(self, post: _Post) -> WorkerProcess:
        view = post.setup.view
        return WorkerProcess(view, heard=lambda payload: self._hear(post, payload), said=self._notices.tell)

    async def _keep(self, post: _Post) -> None:
        """Run one worker's processes, one after the other."""
        worker = post.setup.view.id
        while not self._stopping:
            process = post.process
            assert process is not None
            post.heard_s, post.failure, post.cannot_load = now_s(), "", False
            ended = await self._run(post, process)
            if self._stopping:
                return
            process.state = "lost"
            if post.retiring:
                self._notices.tell(f"{worker} is retired: scaling asks for fewer")
                self._forget(post, "retired")
                return
            reason = post.failure or ended
            self._notices.tell(f"{worker} is lost: {reason}")
            self._audience.lose(worker, reason.splitlines()[0])
            if not await self._may_restart(post, reason):
                if post.given_up and post.is_added:
                    self._forget(post, reason.splitlines()[0])
                return
            role = process.view.role
            post.process = self._make(post)
            post.process.view = msgspec.structs.replace(post.setup.view, role=role)
            self._audience.add(post.process)

    def _forget(self, post: _Post, reason: str) -> None:
        """End a post for good. No other worker is called like it."""
        worker = post.setup.view.id
        self._audience.retire(worker, reason)
        post.given_up = True
        del self._posts[worker]

    async def _run(self, post: _Post, process: WorkerProcess) -> str:
        """Run one process to its end. Returns how it ended."""
        try:
            await process.begin(post.setup, self._arena_fd)
        except OSError as error:
            return f"{post.setup.view.id} could not be started: {error}"
        if self._stopping:
            process.send(Shutdown())
        return await process.wait()

    async def _may_restart(self, post: _Post, reason: str) -> bool:
        """Wait a moment, longer after each recent death; False when there were too many."""
        moment_s, survival = now_s(), self._survival
        post.deaths_s.append(moment_s)
        recent = sum(moment_s - death_s < survival.restart_window_s for death_s in post.deaths_s)
        if recent > survival.restarts_max or (post.cannot_load and recent > 1):
            self._notices.tell(
                f"{post.setup.view.id} died {recent} times within {survival.restart_window_s:.0f} s: given up"
            )
            post.given_up = True
            if not post.is_added:  # scaling is told, and asks for another one: here, or where others live
                self._take_stock(reason)
            return False
        await asyncio.sleep(0.05 * 2 ** min(recent - 1, 6))
        return not self._stopping

    def _take_stock(self, reason: str = "") -> None:
        """Tell when all that are left are ready, or none is left, for this reason."""
        left = [post.process for post in self._posts.values() if not post.given_up]
        if not left:
            self._notices.failed(reason)
        elif all(process is not None and process.state == "ready" for process in left):
            self._notices.ready()

    async def _watch(self, post: _Post) -> None:
        """Kill a worker that does not answer: a hung process holds its requests as firmly as a dead one."""
        survival = self._survival
        while not post.given_up:
            await asyncio.sleep(survival.silent_s / 4)
            process = post.process
            if process is None or process.state == "lost":
                continue
            limit_s = survival.silent_s if process.state == "ready" else survival.start_s
            if now_s() - post.heard_s > limit_s:
                post.failure = f"{post.setup.view.id} has not answered for {limit_s:.0f} s and was killed"
                process.kill()
            elif process.state == "ready":
                process.send(Ping())

    def _hear(self, post: _Post, payload: bytes) -> None:
        post.heard_s = now_s()
        process = post.process
        assert process is not None
        match self._audience.hear(post.setup.view.id, payload):
            case WorkerReady():
                process.state = "ready"
                self._audience.join(process)
                if post.deaths_s:
                    self._notices.tell(f"{post.setup.view.id} is back")
                self._take_stock()
            case WorkerProgress(worker=worker, text=text):
                self._notices.tell(f"{worker}: {text}")
            case WorkerFailed(reason=reason):
                post.failure, post.cannot_load = reason, True
            case Pong() | None:
                pass
