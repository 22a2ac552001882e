"""Faults that strike when a request or a worker reaches a given state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, assert_never

from msgspec import Struct

from baton.core.types import RequestId, WorkerId
from baton.lab.sim import faults
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.fault_injector import FaultInjector

KillMoment = Literal["during", "after"]
"""`during`: in the step, whose KV is left as garbage. `after`: after the step, with its report under way."""
Stage = Literal["arrived", "prefilling", "handed_off", "decoding"]


class KillAtStep(Struct, frozen=True, tag=True, kw_only=True):
    """The process is killed at its nth step."""

    worker: WorkerId
    step: int
    """1 for the first."""
    moment: KillMoment
    death: faults.Death


class Cancel(Struct, frozen=True, tag=True, kw_only=True):
    """A client disconnects `delay_s` after its request has reached a stage."""

    request_id: RequestId
    stage: Stage
    delay_s: float


Fault = faults.Fault | KillAtStep | Cancel


@dataclass(slots=True)
class Trigger:
    """An action that runs once its condition holds. The condition is checked after every event."""

    ready: Callable[[], bool]
    fire: Callable[[], None]


@dataclass(slots=True)
class CampaignFaults(FaultInjector):
    """Performs the faults of a scenario: at their times, or when their condition holds."""

    triggers: list[Trigger] = field(default_factory=list[Trigger])
    """Faults that wait for a condition instead of a time."""

    def schedule_all(self, planned: Iterable[Fault]) -> None:
        for fault in planned:
            if isinstance(fault, KillAtStep):
                kill = partial(self.cluster.kill, fault.worker, fault.death, "killed by a fault")
                self.triggers.append(Trigger(partial(self._at_step, fault), kill))
            elif isinstance(fault, Cancel):
                cancel = partial(cancel_request, self.cluster, fault.request_id)
                later = partial(self.cluster.loop.after, fault.delay_s, cancel)
                self.triggers.append(Trigger(partial(self._reached, fault.request_id, fault.stage), later))
            else:
                self.schedule((fault,))

    def after_event(self) -> None:
        """Fire the triggers whose condition holds."""
        for trigger in [trigger for trigger in self.triggers if trigger.ready()]:
            self.triggers.remove(trigger)
            trigger.fire()

    def _at_step(self, fault: KillAtStep) -> bool:
        worker = self.cluster.worker(fault.worker)
        if worker is None or worker.steps < fault.step:
            return False
        return fault.moment == "during" or worker.executing is None or worker.steps > fault.step

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
