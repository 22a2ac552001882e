"""Injects faults into a simulated cluster, each at its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import fsum, prod
from typing import Any, assert_never

from baton.core.leaving import HostLeaving, RestartWanted
from baton.decide.control.message_order import MessageLostError, MessageOrder
from baton.lab.sim import faults
from baton.lab.sim.cluster import Process, SimCluster
from baton.lab.sim.loop import EventLoop, MessageLink
from baton.lab.sim.worker import SimWorker


@dataclass(slots=True, kw_only=True)
class StruckDelivery:
    """Delivers a link's messages, but loses or repeats the first one.

    The messages are numbered as on a live connection, so the receiver notices the fault.
    """

    loop: EventLoop
    deliver: Callable[[Any], None]
    fault: faults.MessageFault
    broken: Callable[[str], None]
    """Called once, with the reason, when the loss is noticed."""
    _order: MessageOrder = field(default_factory=MessageOrder)
    _sent: int = 0
    _is_broken: bool = False

    def __call__(self, message: object) -> None:
        """Deliver a message of the link, unless it is the lost one."""
        number, self._sent = self._sent, self._sent + 1
        if number == 0 and self.fault.what == "lost":
            self.loop.after(self.fault.ping_s, self._ping)
            return
        for _ in range(2 if number == 0 else 1):
            if self._is_next(number):
                self.deliver(message)

    def _ping(self) -> None:
        """Report the loss, unless a later message has revealed it."""
        self._is_next(self._sent)

    def _is_next(self, number: int) -> bool:
        if self._is_broken:
            return False
        try:
            return self._order.accept(number)
        except MessageLostError as error:
            self._is_broken = True
            self.broken(str(error))
            return False


@dataclass(slots=True)
class FaultInjector:
    """Schedules and performs the faults of one run."""

    cluster: SimCluster
    _slowed: list[tuple[faults.Slow, SimWorker]] = field(default_factory=list[tuple[faults.Slow, SimWorker]])
    """Active slowdowns, each with its process. A restarted process has none."""
    _active: list[faults.DelaySpike | faults.StartsFail] = field(
        default_factory=list[faults.DelaySpike | faults.StartsFail]
    )
    """Active faults of these kinds. They may overlap; each ends at its own time."""

    def schedule(self, planned: Iterable[faults.Fault]) -> None:
        """Schedule the faults on the cluster's event loop."""
        for fault in planned:
            self._schedule(fault)

    def _schedule(self, fault: faults.Fault) -> None:
        loop, cluster = self.cluster.loop, self.cluster
        match fault:
            case faults.Kill():
                loop.at(fault.at_s, partial(cluster.kill, fault.worker, fault.death, "killed by a fault"))
            case faults.Hang():
                loop.at(fault.at_s, partial(self._hang, fault))
            case faults.MessageFault():
                loop.at(fault.at_s, partial(self._strike_link, fault))
            case faults.Slow():
                loop.at(fault.at_s, partial(self._slow_down, fault))
                loop.at(fault.at_s + fault.for_s, partial(self._recover, fault))
            case faults.DelaySpike() | faults.StartsFail():
                loop.at(fault.at_s, partial(self._begin, fault))
                loop.at(fault.at_s + fault.for_s, partial(self._end, fault))
            case faults.Flip():
                loop.at(fault.at_s, partial(cluster.server.set_role, fault.worker, fault.role))
            case faults.Restart():
                loop.at(fault.at_s, self._restart)
            case faults.HostKill():
                loop.at(fault.at_s, partial(cluster.kill_host, fault.host, fault.notice_s, fault.restart_s))
            case faults.HostLeave():
                loop.at(fault.at_s, partial(self._leave, fault))
            case faults.WireCut():
                loop.at(fault.at_s, partial(cluster.wires.cut, fault.one, fault.other))
                loop.at(fault.at_s + fault.for_s, partial(cluster.wires.mend, fault.one, fault.other))
            case faults.StoreFault():
                loop.at(fault.at_s, partial(cluster.stores.break_store, fault.host, fault.tier, fault.what))
                loop.at(
                    fault.at_s + fault.for_s, partial(cluster.stores.mend_store, fault.host, fault.tier, fault.what)
                )
            case _:
                assert_never(fault)

    def _leave(self, fault: faults.HostLeave) -> None:
        """Announce to the server that a host ends. After `drain_s` it ends, even if it still has requests."""
        cluster, host = self.cluster, fault.host
        engine = cluster.engines.get(host)
        if engine is None:
            return

        def end() -> None:
            if cluster.engines.get(host) is engine:
                cluster.kill_host(host, 0.0, cluster.spec.worker_start_s)

        cluster.server.tell(HostLeaving(host))
        cluster.loop.after(fault.drain_s, end)

    def _restart(self) -> None:
        server = self.cluster.server
        server.tell(RestartWanted(tuple(server.routes)))
        self.cluster.keep_ticking()

    def _hang(self, fault: faults.Hang) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is None:
            return
        worker.hang()
        self.cluster.loop.after(fault.silent_s, partial(self._end_hung, fault))

    def _end_hung(self, fault: faults.Hang) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is not None and worker.hung:  # otherwise it was killed, and perhaps restarted, in the meantime
            self.cluster.kill(fault.worker, fault.death, "silent for too long")

    def _strike_link(self, fault: faults.MessageFault) -> None:
        process = self.cluster.processes.get(fault.worker)
        if process is None:
            return
        process.worker.catch_up()
        link: MessageLink[Any] = process.inbound if fault.link == "to_worker" else process.outbound
        link.deliver = StruckDelivery(
            loop=self.cluster.loop, deliver=link.deliver, fault=fault, broken=partial(self._end_struck, fault, process)
        )

    def _end_struck(self, fault: faults.MessageFault, process: Process, why: str) -> None:
        if self.cluster.processes.get(fault.worker) is process:  # otherwise the process has ended in the meantime
            self.cluster.kill(fault.worker, fault.death, why)

    def _slow_down(self, fault: faults.Slow) -> None:
        worker = self.cluster.worker(fault.worker)
        if worker is not None:
            self._slowed.append((fault, worker))
            self._apply_slowdowns(worker)

    def _recover(self, fault: faults.Slow) -> None:
        place = next((place for place, (slow, _) in enumerate(self._slowed) if slow == fault), None)
        if place is not None:
            _, worker = self._slowed.pop(place)
            self._apply_slowdowns(worker)

    def _apply_slowdowns(self, worker: SimWorker) -> None:
        """Set a process's slowdown to the product of all factors that apply to it now."""
        worker.slow_down(prod((fault.factor for fault, slow in self._slowed if slow is worker), start=1.0))

    def _begin(self, fault: faults.DelaySpike | faults.StartsFail) -> None:
        self._active.append(fault)
        self._apply_active(fault)

    def _end(self, fault: faults.DelaySpike | faults.StartsFail) -> None:
        self._active.remove(fault)
        self._apply_active(fault)

    def _apply_active(self, fault: faults.DelaySpike | faults.StartsFail) -> None:
        """Apply the combined effect of all active faults of this kind: delays add up; one `StartsFail` is enough."""
        match fault:
            case faults.DelaySpike():
                delay_messages(
                    self.cluster, fsum(spike.delay_s for spike in self._active if isinstance(spike, faults.DelaySpike))
                )
            case faults.StartsFail():
                self.cluster.can_start = not any(isinstance(other, faults.StartsFail) for other in self._active)


def delay_messages(cluster: SimCluster, delay_s: float) -> None:
    """Delay every message that is sent from now on by another `delay_s`."""
    for worker in cluster.workers:
        worker.catch_up()
    cluster.spike.delay_s = delay_s
