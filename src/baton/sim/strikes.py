"""Faults strike a simulated cluster, each at its time or when its request or worker has come that far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from baton.core.types import RequestId
from baton.sim.cluster import SimCluster, delay_messages, hang_up
from baton.sim.faults import (
    Cancel,
    DelaySpike,
    Fault,
    Flip,
    Hang,
    HostKill,
    Kill,
    KillAtStep,
    Slow,
    Stage,
    StartsFail,
    StoreFault,
    WireCut,
)


@dataclass(slots=True)
class Trigger:
    """Something that waits for a condition, which is looked at between any two events."""

    ready: Callable[[], bool]
    fire: Callable[[], None]


@dataclass(slots=True)
class Strikes:
    """The faults of one run on its cluster."""

    cluster: SimCluster
    triggers: list[Trigger] = field(default_factory=list[Trigger])
    """Those that wait for something else than a time: somebody has to call `after_event` for them."""

    def schedule(self, faults: Iterable[Fault]) -> None:
        """Let faults strike."""
        for fault in faults:
            self._schedule(fault)

    def after_event(self) -> None:
        """Fire what is ready."""
        for trigger in [trigger for trigger in self.triggers if trigger.ready()]:
            self.triggers.remove(trigger)
            trigger.fire()

    def _schedule(self, fault: Fault) -> None:
        loop, cluster = self.cluster.loop, self.cluster
        match fault:
            case Kill():
                loop.at(fault.at_s, partial(self._kill, fault))
            case KillAtStep():
                self.triggers.append(Trigger(partial(self._at_step, fault), partial(self._kill, fault)))
            case Hang():
                loop.at(fault.at_s, partial(self._hang, fault))
            case Slow():
                loop.at(fault.at_s, partial(self._slow_down, fault.worker, fault.factor))
                loop.at(fault.at_s + fault.for_s, partial(self._slow_down, fault.worker, 1.0))
            case DelaySpike():
                loop.at(fault.at_s, partial(self._spike, fault.delay_s))
                loop.at(fault.at_s + fault.for_s, partial(self._spike, 0.0))
            case Cancel():
                cancel = partial(loop.after, fault.delay_s, partial(hang_up, cluster, fault.request_id))
                self.triggers.append(Trigger(partial(self._reached, fault.request_id, fault.stage), cancel))
            case Flip():
                loop.at(fault.at_s, partial(cluster.server.set_role, fault.worker, fault.role))
            case HostKill():
                loop.at(fault.at_s, partial(cluster.kill_host, fault.host, fault.notice_s, fault.restart_s))
            case WireCut():
                loop.at(fault.at_s, partial(cluster.wires.cut, fault.one, fault.other))
                loop.at(fault.at_s + fault.for_s, partial(cluster.wires.mend, fault.one, fault.other))
            case StoreFault():
                loop.at(fault.at_s, partial(cluster.stores.break_store, fault.host, fault.tier, fault.what))
                loop.at(fault.at_s + fault.for_s, partial(cluster.stores.mend_store, fault.host, fault.tier))
            case StartsFail():
                loop.at(fault.at_s, partial(self._allow_starts, allowed=False))
                loop.at(fault.at_s + fault.for_s, partial(self._allow_starts, allowed=True))
            case _:
                assert_never(fault)

    def _kill(self, fault: Kill | KillAtStep) -> None:
        self.cluster.kill(fault.worker, fault.death, "killed by a fault")

    def _at_step(self, fault: KillAtStep) -> bool:
        worker = self.cluster.worker(fault.worker)
        if worker is None or worker.steps < fault.step:
            return False
        return fault.moment == "during" or worker.executing is None or worker.steps > fault.step

    def _hang(self, fault: Hang) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is None:
            return
        worker.hang()
        self.cluster.loop.after(fault.silent_s, partial(self._end_hung, fault))

    def _end_hung(self, fault: Hang) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is not None and worker.hung:  # it may have been killed, and restarted, before
            self.cluster.kill(fault.worker, fault.death, "silent for too long")

    def _slow_down(self, worker_id: str, factor: float) -> None:
        for worker in self.cluster.workers:
            if worker.id == worker_id:
                worker.slow_down(factor)

    def _allow_starts(self, *, allowed: bool) -> None:
        self.cluster.can_start = allowed

    def _spike(self, delay_s: float) -> None:
        delay_messages(self.cluster, delay_s)

    def _is_computed(self, request_id: RequestId) -> bool:
        """Tell whether a step is under way that the request is in."""
        steps = [worker.executing for worker in self.cluster.workers if worker.executing is not None]
        return any(part.request_id == request_id for step in steps for part in step.slices)

    def _reached(self, request_id: RequestId, stage: Stage) -> bool:
        life = self.cluster.server.journal.lives.get(request_id)
        if life is None:
            return False
        match stage:
            case "arrived":
                return True
            case "prefilling":
                return life.started_at_s is not None or self._is_computed(request_id)
            case "handed_off":
                return bool(life.handoffs_s)
            case "decoding":
                return len(life.token_times_s) >= 2
            case _:
                assert_never(stage)
