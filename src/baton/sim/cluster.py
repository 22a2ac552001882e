"""A whole simulated cluster: the server, its workers, the links between them, and what befalls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import assert_never

from baton.control.batcher import Batcher
from baton.control.coordinator import Coordinator, Policies
from baton.core.messages import RetireWorker, SetRole, StartWorker, StepReport, WorkerCommand
from baton.core.types import WorkerId, WorkerView
from baton.kv.blocks import EvictionOrder
from baton.kv.host_pool import HostPool
from baton.policy.batching import BatchingPolicy
from baton.sim.engines import SimEngine
from baton.sim.faults import Death
from baton.sim.journal import Journal, Life
from baton.sim.loop import EventLoop, Link
from baton.sim.server import SimServer
from baton.sim.spec import HOST, ClusterSpec
from baton.sim.worker import SimWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicies:
    """The choices of every part: those of the coordinator, and those of batchers and the pool."""

    cluster: Policies
    batching: BatchingPolicy
    eviction: Callable[[], EvictionOrder]


@dataclass(slots=True)
class _Process:
    worker: SimWorker
    inbound: Link[WorkerCommand]
    outbound: Link[StepReport]


@dataclass(slots=True, kw_only=True)
class SimCluster:
    """Workers come and go; the server stays."""

    spec: ClusterSpec
    policies: SimPolicies
    engine: SimEngine
    """Shared by the workers: it keeps no state about requests, and its arena is the host's."""
    server: SimServer
    loop: EventLoop
    draw: Random
    spike_s: float = 0.0
    """Added to the delay of every message that is sent now."""
    inbound_max: int = 0
    """Most commands that were ever under way to one worker, or waited in it for a step to end."""
    started: int = 0
    """Workers that scaling has asked for."""
    _processes: dict[WorkerId, _Process] = field(default_factory=dict[WorkerId, _Process])

    @property
    def workers(self) -> list[SimWorker]:
        """The living workers."""
        return [process.worker for process in self._processes.values()]

    def worker(self, worker: WorkerId) -> SimWorker | None:
        """Find a living worker."""
        process = self._processes.get(worker)
        return process.worker if process is not None else None

    def boot(self, view: WorkerView) -> None:
        """Start a worker and let it join."""
        outbound = Link(loop=self.loop, delay_s=self._delay_s, deliver=self.server.receive)
        batcher = Batcher(
            view,
            block_tokens=self.spec.kv.block_tokens,
            limits=self.spec.batch,
            batching=self.policies.batching,
            fairness=self.policies.cluster.fairness,
        )
        worker = SimWorker(
            batcher=batcher,
            engine=self.engine,
            cost=self.policies.cluster.cost,
            loop=self.loop,
            report=outbound.send,
        )
        inbound = Link(loop=self.loop, delay_s=self._delay_s, deliver=worker.receive)
        self._processes[view.id] = _Process(worker, inbound, outbound)
        self.server.join(view, inbound.send)

    def kill(self, worker: WorkerId, death: Death, why: str) -> None:
        """Kill a process; the server notices, and a new one joins under the same id. Nothing where it is dead."""
        process = self._processes.pop(worker, None)
        if process is None:
            return
        process.worker.kill()
        process.inbound.close()
        noticed_at_s = self.loop.now_s + death.notice_s
        match death.reports:
            case "delivered":
                noticed_at_s = max(noticed_at_s, process.outbound.drained_at_s)
            case "lost":
                process.outbound.close()
            case "late":
                process.outbound.hold(noticed_at_s + death.late_s)
            case _:
                assert_never(death.reports)
        self._note_queue(process)
        self.loop.at(noticed_at_s, partial(self._lose, process.worker, death.restart_s, why))

    def _lose(self, worker: SimWorker, restart_s: float, why: str) -> None:
        self.server.lose(worker.id, why)
        view = WorkerView(id=worker.id, host=worker.batcher.host, role=worker.batcher.role)
        self.loop.after(restart_s, partial(self.boot, view))

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """Do what roles and scaling ask: a flip is at once, a new worker takes its time to start."""
        match command:
            case SetRole():
                pass  # the coordinator knows; a worker does what it is given
            case StartWorker(role=role):
                self.started += 1
                view = WorkerView(id=WorkerId(f"{role}-added-{self.started}"), host=HOST, role=role)
                self.loop.after(self.spec.worker_start_s, partial(self.boot, view))
            case RetireWorker(worker=worker):
                process = self._processes.pop(worker)
                process.worker.kill()
                process.inbound.close()
                self.loop.at(process.outbound.drained_at_s, partial(self.server.lose, worker, "retired"))
            case _:
                assert_never(command)

    def note_queues(self) -> None:
        """Bring `inbound_max` up to date."""
        for process in self._processes.values():
            self._note_queue(process)

    def _note_queue(self, process: _Process) -> None:
        longest = max(process.inbound.in_flight_max, process.worker.inbox_max)
        self.inbound_max = max(self.inbound_max, longest)

    def _delay_s(self) -> float:
        link = self.spec.link
        return link.delay_min_s + (link.delay_max_s - link.delay_min_s) * self.draw.random() + self.spike_s


def cluster_coordinator(spec: ClusterSpec, policies: SimPolicies) -> Coordinator:
    """Make the coordinator that a cluster file describes."""
    return Coordinator(policies.cluster, spec.kv.block_tokens)


def build_cluster(
    spec: ClusterSpec,
    policies: SimPolicies,
    engine: SimEngine,
    *,
    seed: int,
    keep_log: bool,
    closed: Callable[[Life], None],
) -> SimCluster:
    """Put a cluster together and let its workers join at time 0."""
    loop = EventLoop()
    pool = HostPool(
        host=HOST, blocks_total=spec.kv.blocks, block_tokens=spec.kv.block_tokens, eviction=policies.eviction
    )
    server = SimServer(
        loop=loop,
        coordinator=cluster_coordinator(spec, policies),
        pool=pool,
        journal=Journal(keep_log=keep_log),
        closed=closed,
        reshape=lambda command: cluster.reshape(command),
    )
    cluster = SimCluster(
        spec=spec, policies=policies, engine=engine, server=server, loop=loop, draw=Random(f"links {seed}")
    )
    for view in spec.views():
        cluster.boot(view)
    return cluster
