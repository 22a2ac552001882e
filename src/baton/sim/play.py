"""Play a scenario: clients arrive, faults strike, checkers watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from baton.core.types import Request, RequestId
from baton.kv.hashing import block_hashes
from baton.sim.checkers import Watch, check_end, check_refusal, check_text
from baton.sim.cluster import SimCluster, build_cluster, delay_messages, hang_up
from baton.sim.engines import ContentEngine
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
from baton.sim.journal import Journal, Life
from baton.sim.restless import play_policies
from baton.sim.scenario import PlannedRequest, Scenario

PLAY_S_MAX = 300.0
"""Virtual seconds within which every scenario must have come to its end."""
EVENTS_MAX = 50_000


@dataclass(slots=True)
class Trigger:
    """Something that waits for a condition, which is looked at between any two events."""

    ready: Callable[[], bool]
    fire: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Play:
    """One scenario on one cluster."""

    scenario: Scenario
    cluster: SimCluster
    watch: Watch
    followers: dict[RequestId, list[PlannedRequest]] = field(default_factory=dict[RequestId, list[PlannedRequest]])
    triggers: list[Trigger] = field(default_factory=list[Trigger])

    def schedule(self) -> None:
        loop = self.cluster.loop
        for planned in self.scenario.requests:
            if planned.follows is None:
                loop.at(planned.at_s, partial(self.submit, planned, ()))
            else:
                self.followers.setdefault(planned.follows, []).append(planned)
        for fault in self.scenario.faults:
            self._schedule_fault(fault)

    def run(self) -> None:
        """Run to the end under all checkers. Raises Violation where an invariant breaks."""
        ended = self.cluster.loop.run(until_s=PLAY_S_MAX, events_max=EVENTS_MAX, after_each=self._after_each)
        deadly = any(isinstance(fault, Kill | KillAtStep | Hang | HostKill) for fault in self.scenario.faults)
        check_end(self.watch, ended=ended, failures_allowed=deadly)
        for life in self.cluster.server.journal.lives.values():
            check_text(life, self.scenario.cluster.window, layers=self.scenario.cluster.layers)

    def _after_each(self) -> None:
        self.watch.after_event()
        for trigger in [trigger for trigger in self.triggers if trigger.ready()]:
            self.triggers.remove(trigger)
            trigger.fire()

    def submit(self, planned: PlannedRequest, before: tuple[int, ...]) -> None:
        prompt = (*before, *planned.prompt)
        request = Request(
            id=planned.id,
            prompt_tokens=len(prompt),
            block_hashes=block_hashes(
                prompt, block_tokens=self.scenario.cluster.kv.block_tokens, cache_salt=planned.cache_salt
            ),
            output_tokens_max=planned.output_tokens_max,
            arrived_at_s=self.cluster.loop.now_s,
            sampling=planned.sampling,
            priority=planned.priority,
            cache_salt=planned.cache_salt,
        )
        self.cluster.server.submit(request, prompt)

    def closed(self, life: Life) -> None:
        """Let the next turns of a chat follow: their prompts hold the prompt and the answer of this one."""
        check_refusal(self.cluster, life)
        for planned in self.followers.pop(life.request.id, ()):
            self.cluster.loop.after(planned.at_s, partial(self.submit, planned, tuple(life.tokens)))

    def _schedule_fault(self, fault: Fault) -> None:
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
        self.cluster.kill(fault.worker, fault.death, "killed by the scenario")

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

    def _reached(self, request_id: RequestId, stage: Stage) -> bool:
        life = self.cluster.server.journal.lives.get(request_id)
        if life is None:
            return False
        match stage:
            case "arrived":
                return True
            case "prefilling":
                return life.started_at_s is not None
            case "handed_off":
                return bool(life.handoffs_s)
            case "decoding":
                return len(life.token_times_s) >= 2
            case _:
                assert_never(stage)


def stage(scenario: Scenario) -> Play:
    """Build a scenario's cluster and schedule everything that will happen."""
    spec = scenario.cluster
    plays: list[Play] = []
    cluster = build_cluster(
        spec,
        play_policies(spec, scenario.policy),
        lambda host: ContentEngine(
            blocks=spec.kv_of(host).blocks,
            block_tokens=spec.kv_of(host).block_tokens,
            window=spec.window,
            layers=spec.layers,
        ),
        seed=scenario.seed,
        journal=Journal(keep_log=True),
        closed=lambda life: plays[0].closed(life),
    )
    plays.append(Play(scenario=scenario, cluster=cluster, watch=Watch(cluster=cluster)))
    plays[0].schedule()
    return plays[0]


def play(scenario: Scenario) -> SimCluster:
    """Run a scenario to its end under all checkers. Raises Violation where an invariant breaks."""
    playing = stage(scenario)
    playing.run()
    return playing.cluster
