"""Play a scenario: submit its requests, inject its faults, and check the invariants after every event."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from baton.core.types import Request, RequestId, ServiceClass
from baton.decide.kv.hashing import block_hashes
from baton.lab.sim.build import build_cluster
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Hang, HostKill, HostLeave, Kill, MessageFault
from baton.lab.sim.journal import Journal, Life
from tests.campaign.checkers import Watch, check_end, check_refusal, check_text
from tests.campaign.client_checks import check_client
from tests.campaign.content_engine import ContentEngine
from tests.campaign.edge import HttpEdge
from tests.campaign.restless import play_policies
from tests.campaign.scenario import PlannedRequest, Scenario
from tests.campaign.triggers import CampaignFaults, KillAtStep

PLAY_S_MAX = 300.0
"""Virtual seconds within which every scenario must end."""
EVENTS_MAX = 50_000


@dataclass(slots=True, kw_only=True)
class Play:
    """One scenario on one cluster."""

    scenario: Scenario
    cluster: SimCluster
    watch: Watch
    strikes: CampaignFaults
    edge: HttpEdge | None
    """The HTTP routes, if the scenario has clients."""
    followers: dict[RequestId, list[PlannedRequest]] = field(default_factory=dict[RequestId, list[PlannedRequest]])

    def schedule(self) -> None:
        loop = self.cluster.loop
        for planned in self.scenario.requests:
            if planned.follows is None:
                loop.at(planned.at_s, partial(self.submit, planned, ()))
            else:
                self.followers.setdefault(planned.follows, []).append(planned)
        if self.edge is not None:
            self.edge.schedule()
        self.strikes.schedule_all(self.scenario.faults)

    def run(self) -> None:
        """Run to the end under all checkers. Raises Violation where an invariant breaks."""
        try:
            self._run()
        finally:
            if self.edge is not None:
                self.edge.close()

    def _run(self) -> None:
        ended = self.cluster.loop.run(until_s=PLAY_S_MAX, events_max=EVENTS_MAX, after_each=self._after_each)
        ends_workers = Kill | KillAtStep | Hang | HostKill | HostLeave | MessageFault
        deadly = any(isinstance(fault, ends_workers) for fault in self.scenario.faults)
        check_end(self.watch, ended=ended, failures_allowed=deadly)
        for life in self.cluster.server.journal.lives.values():
            check_text(life, self.scenario.cluster.window, layers=self.scenario.cluster.layers)
        for client in self.edge.clients if self.edge is not None else ():
            check_client(client, self.cluster.server.journal.lives, failures_allowed=deadly)

    def _after_each(self) -> None:
        self.watch.after_event()
        self.strikes.after_event()
        if self.edge is not None:
            self.edge.after_event()

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
            service=ServiceClass(name="copied", copy_tokens=planned.copy_tokens) if planned.copy_tokens else None,
        )
        self.cluster.server.submit(request, prompt)

    def closed(self, life: Life) -> None:
        """Schedule the follow-up turns of a closed request. Their prompts begin with its prompt and its answer."""
        check_refusal(self.cluster, life)
        if self.edge is not None:
            self.edge.gateway.closed(life)
        for planned in self.followers.pop(life.request.id, ()):
            self.cluster.loop.after(planned.at_s, partial(self.submit, planned, tuple(life.tokens)))


def prepare_play(scenario: Scenario) -> Play:
    """Build a scenario's cluster and schedule its requests and faults."""
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
            slots=spec.spill.blocks if spec.spill is not None else 0,
        ),
        seed=scenario.seed,
        journal=Journal(keep_log=True),
        closed=lambda life: plays[0].closed(life),
    )
    plays.append(
        Play(
            scenario=scenario,
            cluster=cluster,
            watch=Watch(cluster=cluster, policy=scenario.policy),
            strikes=CampaignFaults(cluster),
            edge=HttpEdge(cluster, scenario.clients) if scenario.clients else None,
        )
    )
    plays[0].schedule()
    return plays[0]


def play(scenario: Scenario) -> SimCluster:
    """Run a scenario to its end under all checkers. Raises Violation where an invariant breaks."""
    playing = prepare_play(scenario)
    playing.run()
    return playing.cluster
