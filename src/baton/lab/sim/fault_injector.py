"""Injects faults into a simulated cluster, at a fixed time or when a request or worker reaches a given state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import fsum, prod
from typing import assert_never

from baton.core.types import RequestId
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import (
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
from baton.lab.sim.worker import SimWorker


@dataclass(slots=True)
class Trigger:
    """An action that runs once its condition holds. The condition is checked after every event."""

    ready: Callable[[], bool]
    fire: Callable[[], None]


@dataclass(slots=True)
class FaultInjector:
    """Schedules and performs the faults of one run."""

    cluster: SimCluster
    triggers: list[Trigger] = field(default_factory=list[Trigger])
    """Faults that wait for a condition instead of a time."""
    _slow: list[tuple[Slow, SimWorker]] = field(default_factory=list[tuple[Slow, SimWorker]])
    """Active slowdowns, each with its process. A restarted process has none."""
    _lasting: list[DelaySpike | StartsFail] = field(default_factory=list[DelaySpike | StartsFail])
    """Active faults of these kinds. They may overlap; each ends at its own time."""

    def schedule(self, faults: Iterable[Fault]) -> None:
        """Schedule the faults on the cluster's event loop, or as triggers."""
        for fault in faults:
            self._schedule(fault)

    def after_event(self) -> None:
        """Fire the triggers whose condition holds."""
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
                loop.at(fault.at_s, partial(self._slow_down, fault))
                loop.at(fault.at_s + fault.for_s, partial(self._recover, fault))
            case DelaySpike() | StartsFail():
                loop.at(fault.at_s, partial(self._begin, fault))
                loop.at(fault.at_s + fault.for_s, partial(self._end, fault))
            case Cancel():
                cancel = partial(loop.after, fault.delay_s, partial(cancel_request, cluster, fault.request_id))
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
                loop.at(
                    fault.at_s + fault.for_s, partial(cluster.stores.mend_store, fault.host, fault.tier, fault.what)
                )
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

    def _slow_down(self, fault: Slow) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is not None:
            self._slow.append((fault, worker))
            self._pace(worker)

    def _recover(self, fault: Slow) -> None:
        place = next((place for place, (slow, _) in enumerate(self._slow) if slow == fault), None)
        if place is not None:
            _, worker = self._slow.pop(place)
            self._pace(worker)

    def _pace(self, worker: SimWorker) -> None:
        """Slow a process by the product of all factors that apply to it now."""
        worker.slow_down(prod((fault.factor for fault, slow in self._slow if slow is worker), start=1.0))

    def _begin(self, fault: DelaySpike | StartsFail) -> None:
        self._lasting.append(fault)
        self._settle(fault)

    def _end(self, fault: DelaySpike | StartsFail) -> None:
        self._lasting.remove(fault)
        self._settle(fault)

    def _settle(self, fault: DelaySpike | StartsFail) -> None:
        """Apply the combined effect of all active faults of this kind: delays add up; one `StartsFail` is enough."""
        match fault:
            case DelaySpike():
                delay_messages(
                    self.cluster, fsum(spike.delay_s for spike in self._lasting if isinstance(spike, DelaySpike))
                )
            case StartsFail():
                self.cluster.can_start = not any(isinstance(other, StartsFail) for other in self._lasting)

    def _is_computed(self, request_id: RequestId) -> bool:
        """Return whether a running step contains the request."""
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


def cancel_request(cluster: SimCluster, request_id: RequestId) -> None:
    """Cancel a request, after its worker has reported the steps that have ended by now."""
    life = cluster.server.journal.lives.get(request_id)
    worker = cluster.worker(life.worker) if life is not None and life.worker is not None else None
    if worker is not None:
        worker.catch_up()
    cluster.server.cancel(request_id)


def delay_messages(cluster: SimCluster, delay_s: float) -> None:
    """Delay every message that is sent from now on by another `delay_s`."""
    for worker in cluster.workers:
        worker.catch_up()
    cluster.spike.delay_s = delay_s
