"""The server of a simulation: it feeds the real carrier with what clients, operators and workers do."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.core.copies import LayersDone
from baton.core.messages import (
    RoleSet,
    StepReport,
    WorkerCommand,
)
from baton.core.ticking import WaitedTooLong
from baton.core.types import (
    HostId,
    OutputToken,
    Request,
    RequestId,
    Role,
    WorkerId,
    WorkerView,
)
from baton.decide.control.carrier import Carrier
from baton.decide.control.coordinator import Coordinator
from baton.decide.kv.host_pool import HostPool
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.outside import SimOutside
from baton.lab.sim.worker import DecodedSteps


@dataclass(slots=True, kw_only=True)
class SimServer:
    """The driver of the live server, without sockets."""

    loop: EventLoop
    carrier: Carrier
    outside: SimOutside
    wait_s: float
    """How long a request may wait while no worker is there."""
    _is_watching: bool = False
    """It is to be looked at who waits."""

    @property
    def journal(self) -> Journal:
        return self.outside.journal

    @property
    def coordinator(self) -> Coordinator:
        return self.carrier.coordinator

    @property
    def pools(self) -> dict[HostId, HostPool]:
        return self.carrier.pools

    # ---- what clients, operators and processes do

    def submit(self, request: Request, prompt: Sequence[int]) -> None:
        self.journal.lives[request.id] = Life(request=request, tokens=array("I", prompt))
        self.outside.meter.arrived(request)
        self.carrier.arrive(request, self.loop.now_s)
        self._watch_room()

    def cancel(self, request_id: RequestId) -> None:
        self.carrier.cancel(request_id, self.loop.now_s)

    def set_role(self, worker: WorkerId, role: Role) -> None:
        self.carrier.tell(RoleSet(worker, role), self.loop.now_s)

    def tick(self) -> None:
        """Let roles, scaling and moves be looked at."""
        self.carrier.tick(self.outside.meter.take(self.loop.now_s), self.loop.now_s)

    def join(self, view: WorkerView, send: Callable[[WorkerCommand], None]) -> None:
        self.outside.routes[view.id] = send
        self.carrier.join(view, self.loop.now_s)

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Note a dead worker, or one that will not come."""
        self.outside.routes.pop(worker, None)
        self._orphan({worker})
        self.carrier.lose(worker, reason, self.loop.now_s)
        self._watch_room()

    def lose_host(self, host: HostId, reason: str) -> None:
        """Note a dead host, with all its workers."""
        workers = {worker for worker, where in self.carrier.hosts.items() if where == host}
        for worker in workers:
            self.outside.routes.pop(worker, None)
        self._orphan(workers)
        self.carrier.lose_host(host, reason, self.loop.now_s)
        self._watch_room()

    def _watch_room(self) -> None:
        """Look again when the first of those that wait for a worker has waited for too long."""
        since_s = self.coordinator.waiting_since_s
        if since_s is not None and not self._is_watching:
            self._is_watching = True
            self.loop.at(since_s + self.wait_s, self._turn_away)

    def _turn_away(self) -> None:
        self._is_watching = False
        if self.coordinator.waiting_since_s is not None:
            self.carrier.tell(WaitedTooLong(self.wait_s), self.loop.now_s)
            self._watch_room()

    def _orphan(self, workers: set[WorkerId]) -> None:
        for life in self.journal.lives.values():
            if life.worker in workers:
                life.worker = None

    def receive(self, message: StepReport | LayersDone | DecodedSteps) -> None:
        """Take a worker's report: its tokens, then its events in their order, then its load."""
        if isinstance(message, DecodedSteps):
            self._record_run(message)
            if message.report is None:
                return
            message = message.report
        if not isinstance(message, StepReport):
            self.carrier.hear(message, self.loop.now_s)
            return
        for request_id in message.started:
            life = self.outside.journal.lives.get(request_id)
            if life is not None and life.started_at_s is None:
                began_s = message.view.observed_at_s - message.step_s
                life.started_at_s = max(began_s, life.request.arrived_at_s)  # however the difference is rounded
        for token in message.tokens:
            self._record(token, message.worker)
        self.carrier.hear(message, self.loop.now_s)

    def _record_run(self, decoded: DecodedSteps) -> None:
        """Keep tokens of many steps; see `_record`."""
        times_s, worker, lives = decoded.times_s, decoded.worker, self.outside.journal.lives
        for request_id, attempt, token in decoded.parts:
            life = lives.get(request_id)
            if life is not None and not life.closes and life.attempt == attempt and life.worker == worker:
                life.tokens.extend(token * len(times_s))
                life.token_times_s.extend(times_s)

    def _record(self, token: OutputToken, worker: WorkerId) -> None:
        """Keep a token unless it is of an attempt that was given up, of a lost worker, or is there already.

        A lost worker's last words may come late, while nobody has the request: were its last token taken then, its
        end would be refused by the coordinator, and the next worker would write on past it.
        """
        life = self.journal.lives.get(token.request_id)
        if life is None or life.closes:
            return
        abandoned = (token.attempt, worker) != (life.attempt, life.worker)
        if abandoned or token.index != len(life.token_times_s):
            return
        if token.index == 0:
            life.prompt_logprobs = len(token.prompt_logprobs)
            self.outside.meter.prefilled(self.loop.now_s - life.request.arrived_at_s)
        life.tokens.append(token.token)
        life.token_times_s.append(self.loop.now_s)
