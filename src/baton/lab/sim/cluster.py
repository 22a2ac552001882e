"""A whole simulated cluster: the server, hosts with their workers, the wires between them, and what befalls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from msgspec.structs import replace
from numpy.random import PCG64, Generator

from baton.core.config import SurvivalConfig
from baton.core.copies import CopyBlocks, CopyEnded, LayersDone
from baton.core.messages import RetireWorker, SetRole, StartWorker, StepReport, WorkerCommand
from baton.core.tier_messages import FromTier, TierOpened
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.control.advice import Policies
from baton.decide.control.batcher import Batcher
from baton.decide.control.cluster import Cluster, CoordinatorDecision, PoolDecision, PoolRules
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.control.coordinator import Coordinator
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.batching import BatcherPolicies, BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.lab.sim.engines import SimEngine, content_layout
from baton.lab.sim.faults import Death
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import Delays, EventLoop, ExtraDelay, MessageLink
from baton.lab.sim.server import SimServer
from baton.lab.sim.spec import ClusterSpec, SimKV, SimWorkers
from baton.lab.sim.stores import Stores
from baton.lab.sim.wires import Wires
from baton.lab.sim.worker import DecodedSteps, SimWorker

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicies:
    """The choices of every part: those of the coordinator, and those of batchers and the pools."""

    cluster: Policies
    batching: BatchingPolicy
    eviction: Callable[[], EvictionOrder]
    fairness: Callable[[], FairnessPolicy]
    """One per worker, as live: what a worker has served, no other knows."""
    are_own_in_workers: bool = False
    """Batching or fairness is the user's own: what it raises ends the worker, as live."""
    name: str = ""
    """Of the scenario's policies, where a scenario is played: a replay makes them again by it."""


@dataclass(slots=True)
class _Process:
    view: WorkerView
    worker: SimWorker
    inbound: MessageLink[WorkerCommand]
    outbound: MessageLink[StepReport | LayersDone | DecodedSteps]


@dataclass(slots=True, kw_only=True)
class SimCluster:
    """Workers and hosts come and go; the server stays."""

    spec: ClusterSpec
    policies: SimPolicies
    new_engine: Callable[[HostId], SimEngine]
    """One engine per host, shared by its workers: it keeps no state about requests, and its arena is the host's."""
    server: SimServer
    loop: EventLoop
    seed: int
    wires: Wires
    stores: Stores
    engines: dict[HostId, SimEngine] = field(default_factory=dict[HostId, SimEngine])
    spike: ExtraDelay = field(default_factory=ExtraDelay)
    """Set by `delay_messages`."""
    boots: int = 0
    """Worker processes started so far."""
    inbound_max: int = 0
    """Most commands that were ever under way to one worker, or waited in it for a step to end."""
    can_start: bool = True
    """Whether what scaling asks for can be started."""
    _processes: dict[WorkerId, _Process] = field(default_factory=dict[WorkerId, _Process])
    _starting: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """What scaling has asked for, and is neither there nor given up."""
    _retired: set[WorkerId] = field(default_factory=set[WorkerId])
    """Those that died before they could be retired, or once too often: none follows."""
    _broke_s: dict[WorkerId, list[float]] = field(default_factory=dict[WorkerId, list[float]])
    """When each worker's processes have lately ended by themselves."""

    @property
    def workers(self) -> list[SimWorker]:
        """The living workers."""
        return [process.worker for process in self._processes.values()]

    def worker(self, worker: WorkerId) -> SimWorker | None:
        """Find a living worker."""
        process = self._processes.get(worker)
        return process.worker if process is not None else None

    # ---- hosts and workers come

    def open_host(self, host: HostId, kv: SimKV) -> None:
        """Give a host its empty arena."""
        self.engines[host] = self.new_engine(host)
        self.server.tell(
            HostAdded(
                host=host,
                blocks_total=kv.blocks,
                layout=content_layout(kv.block_tokens, self.spec.layers),
                tiers=self.stores.below(host, self.spec.tiers, kv.block_tokens),
            )
        )
        for tier in self.spec.tiers:
            left = self.stores.left(host, tier)
            self.server.tell(FromTier(host, TierOpened(tier.name, left)))

    def boot(self, view: WorkerView) -> None:
        """Start a worker and let it join. Nothing where its host is down, or has brought it up already."""
        if view.host not in self.engines or view.id in self._processes:
            return
        view = self._with_facts(view)
        self._retired.discard(view.id)
        self.boots += 1
        outbound = MessageLink(loop=self.loop, delays=self._delays(0), deliver=self.server.receive)
        batcher = Batcher(
            view,
            block_tokens=self.server.pools[view.host].block_tokens,
            hash_tokens=self.spec.kv.block_tokens,
            limits=self.spec.batch_of(view.kind),
            policies=BatcherPolicies(
                batching=self.policies.batching,
                fairness=self.policies.fairness(),
                cost=self.policies.cluster.cost.on(view.kind),
            ),
        )
        worker = SimWorker(
            batcher=batcher,
            engine=self.engines[view.host],
            cost=self.policies.cluster.cost.on(view.kind),
            loop=self.loop,
            outbound=outbound,
            ended_by=(Exception,) if self.policies.are_own_in_workers else (),
            broke=partial(self._break_down, view.id),
        )
        inbound = MessageLink(loop=self.loop, delays=self._delays(1), deliver=worker.receive)
        self._processes[view.id] = _Process(view, worker, inbound, outbound)
        self.server.join(view, inbound.send)

    def _with_facts(self, view: WorkerView) -> WorkerView:
        """Add the limits of a worker to its view."""
        limits, pool = self.spec.batch_of(view.kind), self.server.pools[view.host]
        return replace(
            view,
            kv_tokens_max=pool.view().blocks_total * pool.block_tokens,
            step_tokens_max=limits.step_tokens_max,
            requests_max=limits.requests_max,
        )

    # ---- and go

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
        self.loop.at(noticed_at_s, partial(self._lose, process.view, death.restart_s, why))

    def _break_down(self, worker: WorkerId, why: str) -> None:
        """Note that a process has ended by itself: it is started again as often as a server does that."""
        moment_s, survival = self.loop.now_s, SurvivalConfig()
        before_s = [at_s for at_s in self._broke_s.get(worker, ()) if moment_s - at_s < survival.restart_window_s]
        self._broke_s[worker] = [*before_s, moment_s]
        if len(before_s) >= survival.restarts_max:
            self._retired.add(worker)
            why += f"; given up after {len(before_s) + 1} such ends within {survival.restart_window_s:g} s"
        self.kill(worker, Death(restart_s=self.spec.worker_start_s), why)

    def _lose(self, view: WorkerView, restart_s: float, why: str) -> None:
        if view.host not in self.engines or view.id in self._processes:
            return  # its host went down meanwhile, which brings it back, or has done so
        self.server.lose(view.id, why)
        if view.id in self._retired:
            self._retired.discard(view.id)
        else:
            self.loop.after(restart_s, partial(self.boot, view))

    def kill_host(self, host: HostId, notice_s: float, restart_s: float) -> None:
        """Take a host down with everything on it. Nothing where it is down.

        It comes back empty, with the workers that it was started with, as an agent does that joins again. What scaling
        has added there is gone for good, and so is a host that only scaling has opened.
        """
        if self.engines.pop(host, None) is None:
            return
        for process in [process for process in self._processes.values() if process.view.host == host]:
            del self._processes[process.view.id]
            process.worker.kill()
            process.inbound.close()
            process.outbound.close()
            self._note_queue(process)
        self.loop.after(notice_s, partial(self._lose_host, host, restart_s))

    def _lose_host(self, host: HostId, restart_s: float) -> None:
        self.server.lose_host(host, "the host is down")
        self.stores.lose_host(host)
        self.wires.lose_host(host)  # after that, so that no transfer begins a failed copy again
        for view in [view for view in self._starting.values() if view.host == host]:
            self._give_up(view)
        if host in self.spec.hosts():
            self.loop.after(restart_s, partial(self._reopen, host))

    def _reopen(self, host: HostId) -> None:
        self.open_host(host, self.spec.kv_of(host))
        for view in self.spec.views():
            if view.host == host:
                self.boot(view)

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """Do what roles and scaling ask: a flip is at once, a new worker takes its time to start."""
        match command:
            case SetRole():
                pass  # the coordinator knows; a worker does what it is given
            case StartWorker():
                view = self._starting[command.worker] = self._added(command)
                self.loop.after(self.spec.worker_start_s, partial(self._boot_added, view))
            case RetireWorker(worker=worker):
                self._retire(worker)
            case _:
                assert_never(command)

    def _added(self, command: StartWorker) -> WorkerView:
        """A worker like the first of its role: of its kind, on its host, or on its own where those have one each."""
        alike = [group for group in self.spec.workers if group.role == command.role] or [SimWorkers(role=command.role)]
        host = HostId(f"host-of-{command.worker}" if alike[0].host == "each" else alike[0].host)
        return WorkerView(id=command.worker, host=host, role=command.role, kind=alike[0].kind)

    def _boot_added(self, view: WorkerView) -> None:
        if view.id not in self._starting:
            return  # it was given up with its host
        if not self.can_start or (view.host in self.spec.hosts() and view.host not in self.engines):
            self._give_up(view)
            return
        del self._starting[view.id]
        if view.host not in self.engines:
            self.open_host(view.host, self.spec.kv_of_kind(view.kind))
        self.boot(view)

    def _give_up(self, view: WorkerView) -> None:
        del self._starting[view.id]
        self.server.lose(view.id, "it cannot be started")

    def _retire(self, worker: WorkerId) -> None:
        process = self._processes.pop(worker, None)
        if process is None:
            self._retired.add(worker)
            return
        process.worker.kill()
        process.inbound.close()
        engine = self.engines[process.view.host]
        self.loop.at(process.outbound.drained_at_s, partial(self._end_retired, process.view, engine))

    def _end_retired(self, view: WorkerView, engine: SimEngine) -> None:
        if self.engines.get(view.host) is engine:  # otherwise its host went down meanwhile, and took it along
            self.server.lose(view.id, "retired")

    # ---- copies between hosts

    def copy_s(self, copy: CopyBlocks) -> float:
        """How long a copy takes that is alone on its wire: what its prefill has not hidden.

        Some layers of some tokens take as long as all layers of so many fewer tokens.
        """
        transfer_s = self.server.cluster.transfers.links.wire_s(copy.source, copy.target, copy.whole_tokens)
        life = self.server.journal.lives.get(copy.request_id)
        wire = self.spec.wire
        computed_s = [*life.token_times_s[:1], *life.handoffs_s[:1]] if life is not None else []
        if life is None or not computed_s or life.started_at_s is None:
            return transfer_s  # a prefix is fetched: nothing is computed meanwhile
        hidden_s = wire.overlap_ratio * (computed_s[0] - life.started_at_s)
        return min(transfer_s, max(wire.residue_s, transfer_s - hidden_s))

    def end_copy(self, copy: CopyBlocks, landed: bool) -> None:  # noqa: FBT001  what Wires calls
        """Move the bytes of a copy that has come to its end, and tell the server."""
        source, target = self.engines.get(copy.source), self.engines.get(copy.target)
        landed = landed and source is not None and target is not None
        if source is not None and target is not None and landed:
            _copy_tokens(copy, source, target, self.server.pools)
        self.server.tell(CopyEnded(copy.request_id, copy.number, landed))

    # ---- time

    def keep_ticking(self) -> None:
        """Let roles, scaling and moves be looked at, as long as anything else is left to do."""
        if self.policies.cluster.is_restless:
            self.loop.after(self.spec.tick_s, self._tick)

    def _tick(self) -> None:
        self.server.tick()
        if not self.loop.is_empty:
            self.loop.after(self.spec.tick_s, self._tick)

    def note_queues(self) -> None:
        """Bring `inbound_max` up to date."""
        for process in self._processes.values():
            self._note_queue(process)

    def _note_queue(self, process: _Process) -> None:
        longest = max(process.inbound.in_flight_max, process.worker.inbox_max)
        self.inbound_max = max(self.inbound_max, longest)

    def _delays(self, direction: int) -> Delays:
        """Every link draws its own delays: they do not depend on what happens elsewhere."""
        link = self.spec.link
        seed = (self.seed & _SEED_MASK, self.boots, direction)
        draw = Generator(PCG64(seed))
        return Delays(min_s=link.delay_min_s, max_s=link.delay_max_s, draw=draw, spike=self.spike)


def _copy_tokens(copy: CopyBlocks, source: SimEngine, target: SimEngine, pools: Mapping[HostId, HostPool]) -> None:
    """Move the bytes of a copy, token by token: hosts may differ in their blocks. An engine with foresight has none."""
    skipped = copy.first_token % pools[copy.source].block_tokens
    for slot in range(copy.tokens) if source.foresight is None else ():
        target.write(copy.write, slot, source.kv_of(copy.read, skipped + slot, copy.layers), copy.layers)


def fresh_cluster(
    spec: ClusterSpec, policies: SimPolicies, steps: list[CoordinatorDecision | PoolDecision] | None = None
) -> Cluster:
    """Make the deciding half of a cluster file, before any host has joined. `steps`: see `Cluster`."""
    coordinator = Coordinator(policies.cluster, spec.kv.block_tokens, window=spec.window)
    rules = PoolRules(eviction=policies.eviction, prompts=spec.prompt_rules)
    return Cluster(coordinator, rules, steps)


def build_cluster(
    spec: ClusterSpec,
    policies: SimPolicies,
    new_engine: Callable[[HostId], SimEngine],
    *,
    seed: int,
    journal: Journal,
    closed: Callable[[Life], None],
) -> SimCluster:
    """Put a cluster together and let its workers join at time 0."""
    loop = EventLoop()
    server = SimServer(
        loop=loop,
        cluster=fresh_cluster(spec, policies, journal.steps),
        journal=journal,
        wait_s=spec.wait_s,
        closed=closed,
        reshape_fleet=lambda command: cluster.reshape(command),
        begin_copy=lambda copy: wires.begin(copy),
        use_tier=lambda command: stores.perform(command),
    )
    wires = Wires(
        loop=loop,
        seconds=lambda copy: cluster.copy_s(copy),
        ended=lambda copy, landed: cluster.end_copy(copy, landed),
    )
    stores = Stores(
        loop=loop,
        engine=lambda host: cluster.engines.get(host),
        ended=lambda host, news: server.tell(FromTier(host, news)),
    )
    cluster = SimCluster(
        spec=spec,
        policies=policies,
        new_engine=new_engine,
        server=server,
        loop=loop,
        seed=seed,
        wires=wires,
        stores=stores,
    )
    for host in spec.hosts():
        cluster.open_host(host, spec.kv_of(host))
    for view in spec.views():
        cluster.boot(view)
    cluster.keep_ticking()
    return cluster
