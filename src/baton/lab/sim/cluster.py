"""A simulated cluster: the server, hosts with their workers, wires and stores, and the failures of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import assert_never

from msgspec.structs import replace
from numpy.random import PCG64, Generator

from baton.core.config import SurvivalConfig
from baton.core.copies import CopyBlocks, CopyEnded, LayersDone
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import RetireWorker, SetRole, StartWorker, StepReport, WorkerCommand
from baton.core.tier_messages import FromTier, TierOpened
from baton.core.types import HostId, WorkerId, WorkerView
from baton.decide.control.advice import Policies
from baton.decide.control.batcher import Batcher
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import CoordinatorDecision, HostAdded, PoolDecision
from baton.decide.control.coordinator import Coordinator
from baton.decide.control.host_pools import PoolRules
from baton.decide.cost.noise import StepNoise
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.batching import BatcherPolicies, BatchingPolicy
from baton.decide.policy.fairness import FairnessPolicy
from baton.lab.sim.engines import SimEngine, content_layout
from baton.lab.sim.faults import Death
from baton.lab.sim.loop import Delays, EventLoop, ExtraDelay, MessageLink
from baton.lab.sim.noise import HostSpeed, StepDraws
from baton.lab.sim.server import SimServer
from baton.lab.sim.spec import ClusterSpec, SimKV, SimWorkers
from baton.lab.sim.stores import Stores
from baton.lab.sim.wires import Wires
from baton.lab.sim.worker import DecodedSteps, SharedCores, SimWorker

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPolicies:
    """The policies of the coordinator, the batchers and the pools."""

    cluster: Policies
    batching: BatchingPolicy
    eviction: Callable[[], EvictionOrder]
    fairness: Callable[[], FairnessPolicy]
    """Makes one policy per worker, as in live mode."""
    are_own_in_workers: bool = False
    """Batching or fairness is a plug-in of the user. An exception in it then ends the worker, as in live mode."""


@dataclass(slots=True)
class Process:
    """A worker process, and its links from and to the server."""

    view: WorkerView
    worker: SimWorker
    inbound: MessageLink[WorkerCommand]
    outbound: MessageLink[StepReport | LayersDone | DecodedSteps]


@dataclass(slots=True, kw_only=True)
class SimCluster:
    """The simulated processes and hosts. Workers and hosts join and leave; the server runs to the end."""

    spec: ClusterSpec
    policies: SimPolicies
    new_engine: Callable[[HostId], SimEngine]
    """Makes the engine of a host. The host's workers share it: it holds the host's arena and no request state."""
    server: SimServer
    loop: EventLoop
    seed: int
    wires: Wires
    stores: Stores
    engines: dict[HostId, SimEngine] = field(default_factory=dict[HostId, SimEngine])
    spike: ExtraDelay = field(default_factory=ExtraDelay)
    """Extra delay of every message. `delay_messages` sets it."""
    boots: int = 0
    """Worker processes started so far."""
    inbound_max: int = 0
    """Highest number of commands that were on the link to one worker, or in its inbox, at the same time."""
    can_start: bool = True
    """New workers of the scaling policy start successfully. A `StartsFail` fault sets it to False."""
    processes: dict[WorkerId, Process] = field(default_factory=dict[WorkerId, Process])
    _starting: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """Workers that scaling requested and that have neither joined nor been given up."""
    _retired: set[WorkerId] = field(default_factory=set[WorkerId])
    """Dead workers that are not restarted: they were to be retired, or exceeded the limit of restarts."""
    _cores: dict[HostId, SharedCores] = field(default_factory=dict[HostId, SharedCores])
    _noise: dict[str, StepNoise | None] = field(default_factory=dict[str, StepNoise | None])
    """By kind of worker."""
    _speeds: dict[HostId, HostSpeed] = field(default_factory=dict[HostId, HostSpeed])
    _is_ticking: bool = False
    _broke_s: dict[WorkerId, list[float]] = field(default_factory=dict[WorkerId, list[float]])
    """Times, within the restart window, at which each worker's process ended by an exception."""

    @property
    def workers(self) -> list[SimWorker]:
        return [process.worker for process in self.processes.values()]

    def worker(self, worker: WorkerId) -> SimWorker | None:
        """Return a living worker, or None."""
        process = self.processes.get(worker)
        return process.worker if process is not None else None

    # ---- start hosts and workers

    def open_host(self, host: HostId, kv: SimKV) -> None:
        """Add a host with an empty arena and the blocks that its tiers still store."""
        self.engines[host] = self.new_engine(host)
        layout, workers_max = content_layout(kv.block_tokens, self.spec.layers), self.spec.workers_max or None
        tiers = self.stores.open_tiers(host, self.spec.tiers, kv.block_tokens)
        self.server.tell(HostAdded(host, kv.blocks, layout, tiers, workers_max))
        for tier in self.spec.tiers:
            held = self.stores.held_hashes(host, tier)
            self.server.tell(FromTier(host, TierOpened(tier.name, held)))

    def boot(self, view: WorkerView) -> None:
        """Start a worker, which then joins. Do nothing if its host is down or the worker already runs."""
        if view.host not in self.engines or view.id in self.processes:
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
            is_stepwise=self.server.coordinator.turns.is_used,
            ended_by=(Exception,) if self.policies.are_own_in_workers else (),
            broke=partial(self._break_down, view.id),
            cores=self._cores_of(view.host),
            draws=self._draws_of(view),
            spill=self.spec.prompt_rules.spill,
        )
        inbound = MessageLink(loop=self.loop, delays=self._delays(1), deliver=worker.receive)
        self.processes[view.id] = Process(view, worker, inbound, outbound)
        self.server.join(view, inbound.send)

    def _with_facts(self, view: WorkerView) -> WorkerView:
        limits, pool = self.spec.batch_of(view.kind), self.server.pools[view.host]
        return replace(
            view,
            kv_tokens_max=pool.view().blocks_total * pool.block_tokens,
            step_tokens_max=limits.step_tokens_max,
            requests_max=limits.requests_max,
        )

    def _cores_of(self, host: HostId) -> SharedCores | None:
        """Return the cores that the workers of a host share. None: each worker has its own."""
        if not self.spec.workers_at_once:
            return None
        return self._cores.setdefault(host, SharedCores(self.spec.workers_at_once))

    def _draws_of(self, view: WorkerView) -> StepDraws | None:
        """Return the draws of a process's step times. None: its steps take the predicted times."""
        if view.kind not in self._noise:
            self._noise[view.kind] = self.spec.noise_of(view.kind)
        noise = self._noise[view.kind]
        if noise is None:
            return None
        speed = self._speeds.setdefault(view.host, HostSpeed(Random(f"{self.seed} {view.host}")))
        return StepDraws(noise, speed, Random(f"{self.seed} {view.id} {self.boots}"))

    # ---- end workers and hosts

    def kill(self, worker: WorkerId, death: Death, why: str) -> None:
        """Kill a worker process, unless it is dead. The server notices later; a new process joins under the same id."""
        process = self.processes.pop(worker, None)
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
        """End a process in which an exception was raised. It is restarted up to the live server's limit of restarts."""
        moment_s, survival = self.loop.now_s, SurvivalConfig()
        before_s = [at_s for at_s in self._broke_s.get(worker, ()) if moment_s - at_s < survival.restart_window_s]
        self._broke_s[worker] = [*before_s, moment_s]
        if len(before_s) >= survival.restarts_max:
            self._retired.add(worker)
            why += f"; given up after {len(before_s) + 1} such ends within {survival.restart_window_s:g} s"
        self.kill(worker, Death(restart_s=self.spec.worker_start_s), why)

    def _lose(self, view: WorkerView, restart_s: float, why: str) -> None:
        if view.host not in self.engines or view.id in self.processes:
            return  # its host went down meanwhile: the host restarts the worker, or has restarted it
        self.server.lose(view.id, why)
        if view.id in self._retired:
            self._retired.discard(view.id)
        else:
            self.loop.after(restart_s, partial(self.boot, view))

    def kill_host(self, host: HostId, notice_s: float, restart_s: float) -> None:
        """Take a host down, unless it is down. It returns empty, with its initial workers, unless scaling opened it."""
        if self.engines.pop(host, None) is None:
            return
        for process in [process for process in self.processes.values() if process.view.host == host]:
            del self.processes[process.view.id]
            process.worker.kill()
            process.inbound.close()
            process.outbound.close()
            self._note_queue(process)
        self.loop.after(notice_s, partial(self._lose_host, host, restart_s))

    def _lose_host(self, host: HostId, restart_s: float) -> None:
        self.server.lose_host(host, "the host is down")
        self.stores.lose_host(host)
        self.wires.lose_host(host)  # after `server.lose_host`, so that no transfer retries a failed copy
        for view in [view for view in self._starting.values() if view.host == host]:
            self._give_up(view)
        if host in self.spec.hosts():
            self.loop.after(restart_s, partial(self._reopen, host))

    def _reopen(self, host: HostId) -> None:
        self.open_host(host, self.spec.kv_of(host))
        for view in self.spec.views():
            if view.host == host:
                self.boot(view)

    def reshape(self, command: SetRole | StartWorker | RetireWorker | RestartWorker | DismissHost) -> None:
        """Perform a command of roles or scaling. A role flip is immediate; a new worker needs `worker_start_s`."""
        match command:
            case SetRole():
                pass  # only the coordinator uses roles; a worker executes any request that it receives
            case StartWorker():
                view = self._starting[command.worker] = self._added(command)
                self.loop.after(self.spec.worker_start_s, partial(self._boot_added, view))
            case RetireWorker(worker=worker):
                self._retire(worker)
            case RestartWorker(worker=worker):
                self.kill(worker, Death(restart_s=self.spec.worker_start_s), "it restarts")
            case DismissHost(host=host):
                self.kill_host(host, 0.0, self.spec.worker_start_s)
            case _:
                assert_never(command)

    def _added(self, command: StartWorker) -> WorkerView:
        """Return the view of a worker to add, of its role's first group. `host = "each"` there makes a new host."""
        alike = [group for group in self.spec.workers if group.role == command.role] or [SimWorkers(role=command.role)]
        host = f"host-of-{command.worker}" if alike[0].host == "each" else alike[0].host
        return WorkerView(id=command.worker, host=command.host or HostId(host), role=command.role, kind=alike[0].kind)

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
        process = self.processes.pop(worker, None)
        if process is None:
            self._retired.add(worker)
            return
        process.worker.kill()
        process.inbound.close()
        engine = self.engines[process.view.host]
        self.loop.at(process.outbound.drained_at_s, partial(self._end_retired, process.view, engine))

    def _end_retired(self, view: WorkerView, engine: SimEngine) -> None:
        if self.engines.get(view.host) is engine:  # otherwise its host went down meanwhile, and the worker with it
            self.server.lose(view.id, "retired")

    # ---- copies between hosts

    def copy_s(self, copy: CopyBlocks) -> float:
        """Return the duration of a copy that is alone on its wire, less the part that overlaps its prefill, in seconds.

        A copy of some layers takes as long as a copy of all layers of proportionally fewer tokens.
        """
        transfer_s = self.server.cluster.transfers.links.wire_s(copy.source, copy.target, copy.whole_tokens)
        life, wire = self.server.journal.lives.get(copy.request_id), self.spec.wire
        computed_s = [*life.token_times_s[:1], *life.handoffs_s[:1]] if life is not None else []
        if life is None or not computed_s or life.started_at_s is None:
            return transfer_s  # a prefix fetch precedes the prefill, so no computation hides it
        if max(len(life.token_times_s), len(life.handoffs_s)) > 1:
            return transfer_s  # a later handoff: counted in full
        hidden_s = wire.overlap_ratio * (computed_s[0] - life.started_at_s)
        return min(transfer_s, max(wire.residue_s, transfer_s - hidden_s))

    def end_copy(self, copy: CopyBlocks, landed: bool) -> None:  # noqa: FBT001  the signature that Wires calls
        """Move the bytes of a finished copy and tell the server whether it landed."""
        source, target = self.engines.get(copy.source), self.engines.get(copy.target)
        landed = landed and source is not None and target is not None
        if source is not None and target is not None and landed:
            _copy_tokens(copy, source, target, self.server.pools)
        self.server.tell(CopyEnded(copy.request_id, copy.number, landed))

    # ---- time

    def keep_ticking(self) -> None:
        """Tick the policies of roles, scaling and moves every `tick_s`, until no other event is scheduled."""
        if self.server.coordinator.needs_ticks and not self._is_ticking:
            self._is_ticking = True
            self._tick_later()

    def _tick_later(self) -> None:
        self.loop.ticks += 1
        self.loop.after(self.spec.tick_s, self._tick)

    def _tick(self) -> None:
        self.loop.ticks -= 1
        self.server.tick()
        self._is_ticking = not self.loop.has_only_ticks
        if self._is_ticking:
            self._tick_later()

    def note_queues(self) -> None:
        """Raise `inbound_max` to the longest queue of messages that any worker's inbox or link has had so far."""
        for process in self.processes.values():
            self._note_queue(process)

    def _note_queue(self, process: Process) -> None:
        longest = max(process.inbound.in_flight_max, process.worker.inbox_max)
        self.inbound_max = max(self.inbound_max, longest)

    def _delays(self, direction: int) -> Delays:
        """Return the delays of one link. Each link has its own seed, so its delays do not depend on other links."""
        link = self.spec.link
        seed = (self.seed & _SEED_MASK, self.boots, direction)
        draw = Generator(PCG64(seed))
        return Delays(min_s=link.delay_min_s, max_s=link.delay_max_s, draw=draw, spike=self.spike)


def _copy_tokens(copy: CopyBlocks, source: SimEngine, target: SimEngine, pools: Mapping[HostId, HostPool]) -> None:
    """Move a copy's bytes token by token, as hosts may differ in block size. An engine with a predictor has none."""
    skipped = copy.first_token % pools[copy.source].block_tokens
    for slot in range(copy.tokens) if source.predictor is None else ():
        target.write(copy.write, slot, source.kv_of(copy.read, skipped + slot, copy.layers), copy.layers)


def fresh_cluster(
    spec: ClusterSpec, policies: SimPolicies, steps: list[CoordinatorDecision | PoolDecision] | None = None
) -> Cluster:
    """Return a `Cluster` with a cluster file's rules, and without hosts. It appends every decision to `steps`."""
    coordinator = Coordinator(policies.cluster, spec.kv.block_tokens, window=spec.window, queue=spec.start_queue())
    rules = PoolRules(eviction=policies.eviction, prompts=spec.prompt_rules)
    return Cluster(coordinator, rules, steps)
