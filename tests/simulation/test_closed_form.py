"""Decode steps that are jumped over leave what stepping leaves: the same records, bit for bit, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from baton.core.config import BatchLimits, Topology
from baton.core.types import BlockHash, HostId, Request, RequestId, Sampling, Slo, WorkerView
from baton.decide.kv.hashing import block_hashes
from baton.decide.policy.policy_sets import POLICY_SETS, policy_set
from baton.lab.sim.build import build_cluster
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.engines import STOP_TOKEN, LengthEngine
from baton.lab.sim.fault_injector import delay_messages
from baton.lab.sim.faults import Death
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.replay_trace import check_nothing_left
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKV, SimLink, SimWorkers
from baton.lab.sim.worker import SimWorker
from tests.campaign.scenario import REPORTS
from tests.campaign.triggers import cancel_request

SEEDS = 60
BLOCK_TOKENS = 4
Ask = tuple[float, Request, int]
"""When, what, and how long the answer is."""
Befall = Callable[[SimCluster], None]


@dataclass(slots=True)
class Play:
    """One cluster, what it is asked, what befalls it, and what comes of it."""

    jumps: bool
    lengths: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    ended: list[object] = field(default_factory=list[object])
    jumped_steps: int = 0
    events: int = 0

    def run(self, spec: ClusterSpec, policy: str, asks: list[Ask], befalls: list[tuple[float, Befall]]) -> None:
        cluster = build_cluster(
            spec,
            configured_policies(policy_set(policy), spec),
            lambda host: LengthEngine(self.lengths, jumps=self.jumps),
            seed=7,
            journal=Journal(keep_log=False),
            closed=self.close,
        )
        for at_s, request, length in asks:
            self.lengths[request.id] = length
            cluster.loop.at(at_s, partial(self.submit, cluster, request))
        for at_s, befall in befalls:
            cluster.loop.at(at_s, partial(befall, cluster))
        assert cluster.loop.run(until_s=1e6, events_max=400_000, after_each=lambda: None)
        check_nothing_left(cluster)
        for pool in cluster.server.pools.values():
            pool.check()
        self.ended.append({host: pool.view() for host, pool in cluster.server.pools.items()})
        self.ended.append(cluster.server.meter.take(cluster.loop.now_s))
        self.events = cluster.loop.events

    def submit(self, cluster: SimCluster, request: Request) -> None:
        cluster.server.submit(request, [7] * request.prompt_tokens)

    def close(self, life: Life) -> None:
        self.ended.append(
            (life.request.id, life.closes, life.attempt, life.started_at_s, life.handoffs_s, life.cached_tokens,
             life.token_times_s.tolist(), life.output)
        )  # fmt: skip


def draw_spec(draw: Random) -> ClusterSpec:
    jitter_s = draw.choice((0.0, 0.0, 0.001, 0.03))
    hosts = draw.choice((("host-0", "host-0"), ("host-0", "host-1")))
    workers = (
        SimWorkers(role="prefill", count=draw.randint(0, 2), host=hosts[0]),
        SimWorkers(role="decode", count=draw.randint(0, 2), host=hosts[1]),
        SimWorkers(role="mixed", count=draw.randint(1, 2), host=hosts[0]),
    )
    return ClusterSpec(
        topology=Topology(mixed=1),
        workers=workers,
        kv=SimKV(blocks=draw.choice((40, 60, 400)), block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(
            step_tokens_max=draw.choice((8, 32)),
            requests_max=draw.choice((2, 4, 16)),
            growth_tokens=draw.choice((1, 8, 64)),
        ),
        cost=SimCost(
            step_overhead_s=0.01,
            prefill_token_s=0.001,
            decode_request_s=draw.choice((0.0, 0.001)),
            context_token_s=draw.choice((0.0, 0.00001)),
        ),
        link=SimLink(delay_min_s=0.0005, delay_max_s=0.0005 + jitter_s),
        queue_requests_max=draw.choice((6, 1000)),
        tick_s=0.5,
    )


def draw_asks(draw: Random) -> list[Ask]:
    spread_s, shares = draw.choice((0.1, 3.0)), draw.random() < 0.5
    return [draw_ask(draw, number, spread_s, shares) for number in range(24)]


def draw_ask(draw: Random, number: int, spread_s: float, shares: bool) -> Ask:
    at_s, prompt_tokens = round(draw.uniform(0, spread_s), draw.choice((1, 6))), draw.randint(1, 40)
    stream = draw.choice((0, 1, 100 + number))
    hashes: tuple[BlockHash, ...] = ()
    if shares:
        hashes = block_hashes([stream + position for position in range(prompt_tokens)], block_tokens=BLOCK_TOKENS)
    request = Request(
        id=RequestId(f"r{number}"),
        prompt_tokens=prompt_tokens,
        block_hashes=hashes,
        output_tokens_max=draw.choice((1, 30, 100)),
        arrived_at_s=at_s,
        sampling=Sampling(stop_token_ids=(STOP_TOKEN,)),
        slo=draw.choice((None, Slo(ttft_s=1.0, tpot_s=0.02))),
        tenant=draw.choice(("a", "b")),
        shares_blocks=shares,
    )
    return at_s, request, draw.choice((1, 2, 20, 20, 20, 60, 120))


def draw_befalls(draw: Random, spec: ClusterSpec) -> list[tuple[float, Befall]]:
    """Deaths, hangs, slow workers, late messages, clients that hang up, role flips, hosts that go down."""
    views = spec.views()
    found: list[tuple[float, Befall]] = []
    for _ in range(draw.randint(0, 6)):
        at_s, view = draw.uniform(0, 3), draw.choice(views)
        death = Death(
            reports=draw.choice(REPORTS),
            notice_s=draw.choice((0.0, 0.02)),
            restart_s=draw.choice((0.0, 0.2)),
            late_s=draw.choice((0.0, 0.1)),
        )
        request_id = RequestId(f"r{draw.randrange(24)}")
        kinds: list[Befall] = [
            lambda cluster, view=view, death=death: cluster.kill(view.id, death, "killed"),
            lambda cluster, view=view, death=death: hang(cluster, view, death),
            lambda cluster, view=view: on(cluster, view, lambda worker: worker.slow_down(3.0)),
            lambda cluster, view=view: on(cluster, view, lambda worker: worker.slow_down(1.0)),
            lambda cluster: delay_messages(cluster, 0.02),
            lambda cluster: delay_messages(cluster, 0.0),
            lambda cluster, request_id=request_id: cancel_request(cluster, request_id),
            lambda cluster, request_id=request_id: cancel_request(cluster, request_id),
            lambda cluster, view=view: cluster.server.set_role(view.id, "mixed"),
            lambda cluster: cluster.kill_host(HostId("host-0"), 0.01, 0.1),
        ]
        found.append((at_s, draw.choice(kinds)))
    return found


def on(cluster: SimCluster, view: WorkerView, act: Callable[[SimWorker], None]) -> None:
    worker = cluster.worker(view.id)
    if worker is not None:
        act(worker)


def hang(cluster: SimCluster, view: WorkerView, death: Death) -> None:
    on(cluster, view, lambda worker: worker.hang())
    cluster.loop.after(0.3, lambda: cluster.kill(view.id, death, "silent"))


def both(seed: int, policy: str, *, faults: bool) -> tuple[Play, Play]:
    draw = Random(f"closed form {seed}")
    spec, asks = draw_spec(draw), draw_asks(draw)
    befalls = draw_befalls(draw, spec) if faults else []
    plays = Play(jumps=False), Play(jumps=True)
    for played in plays:
        played.run(spec, policy, asks, befalls)
    return plays


@pytest.mark.parametrize("seed", range(SEEDS))
def test_jumping_gives_what_stepping_gives(seed: int) -> None:
    stepped, jumped = both(seed, "baton", faults=False)
    assert jumped.ended == stepped.ended


@pytest.mark.parametrize("seed", range(SEEDS, 2 * SEEDS))
def test_jumping_gives_what_stepping_gives_with_faults(seed: int) -> None:
    stepped, jumped = both(seed, "baton", faults=True)
    assert jumped.ended == stepped.ended


@pytest.mark.parametrize("policy", sorted(POLICY_SETS))
def test_jumping_gives_what_stepping_gives_under_every_policy(policy: str) -> None:
    for seed in (1000, 1001, 1002):
        stepped, jumped = both(seed, policy, faults=True)
        assert jumped.ended == stepped.ended, f"seed {seed}"


def test_jumps_save_events() -> None:
    """One long answer alone: a handful of events however long it is, not one or two for every token."""
    spec = ClusterSpec(topology=Topology(mixed=1), batch=BatchLimits(growth_tokens=1000))
    request = Request(id=RequestId("a"), prompt_tokens=10, output_tokens_max=500, arrived_at_s=0.0)
    plays = Play(jumps=False), Play(jumps=True)
    for played in plays:
        played.run(spec, "baton", [(0.0, request, 500)], [])
    assert plays[0].ended == plays[1].ended
    assert plays[0].events > 900
    assert plays[1].events < 40
