"""Draw small scenarios from a seed: a cluster, its requests, and its faults."""

from __future__ import annotations

from random import Random

from msgspec import Struct
from msgspec.structs import asdict, replace

from baton.compute.hash_engine import BYTE_TOKENS_FROM
from baton.core.config import BatchLimits, Topology
from baton.core.kv_config import Preemption
from baton.core.types import HostId, RequestId, Role, Sampling, WorkerId
from baton.decide.kv.window import Window
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.sim.engines import STOP_TOKEN
from baton.lab.sim.faults import (
    Death,
    DelaySpike,
    Flip,
    Hang,
    HostKill,
    HostLeave,
    Kill,
    MessageFault,
    ReportsFate,
    Restart,
    Slow,
    StartsFail,
    StoreFault,
    StoreTrouble,
    WireCut,
)
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKind, SimKV, SimLink, SimTier, SimWorkers
from tests.campaign.clients import PlannedClient, draw_clients
from tests.campaign.triggers import Cancel, Fault, KillAtStep, KillMoment, Stage

TOPOLOGIES: tuple[tuple[int, int, int], ...] = (
    (1, 1, 0), (1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 0), (0, 0, 1), (0, 0, 2), (1, 1, 1),
)  # fmt: skip
"""Prefill, decode, mixed workers."""
REPORTS: tuple[ReportsFate, ...] = ("delivered", "lost", "late")
STAGES: tuple[Stage, ...] = ("arrived", "prefilling", "handed_off", "decoding")
BLOCK_TOKENS = 4
RESTLESS = "restless"
"""Name of the policies in `tests.campaign.restless`, without roles and scaling."""
_PREEMPTION: tuple[Preemption, ...] = ("cheaper", "swap", "swap", "recompute")
RESTLESS_FLEET = "restless-fleet"
"""Name of the restless policies with roles and scaling."""
FLEET_RATIO = 0.25
"""Share of the seeds that use the policies `RESTLESS_FLEET`."""
_ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")


class PlannedRequest(Struct, frozen=True, kw_only=True):
    """A request of a scenario."""

    id: RequestId
    at_s: float
    """Arrival time. For a follow-up: the delay after the end of the request that it follows."""
    prompt: tuple[int, ...]
    """The prompt. For a follow-up: the tokens added to the prompt and output of the request that it follows."""
    output_tokens_max: int
    sampling: Sampling
    priority: int = 0
    follows: RequestId | None = None
    cache_salt: str = ""
    copy_tokens: int = 0
    """As in `ServiceClass`. 0: it has no class."""


class Scenario(Struct, frozen=True, kw_only=True):
    """All inputs of a simulation. Equal scenarios give identical runs."""

    seed: int
    cluster: ClusterSpec
    requests: tuple[PlannedRequest, ...]
    faults: tuple[Fault, ...] = ()
    clients: tuple[PlannedClient, ...] = ()
    """HTTP clients, which send further requests."""
    policy: str = "baton"
    """A policy set of `baton sim --policy`, `RESTLESS`, or `RESTLESS_FLEET`."""


STREAMED_RATIO = 0.2
"""Share of the scenarios that stream KV: long prompts, several hosts and a shared tier."""
RARE_TICK_S = 0.1
FREQUENT_TICKS_WAIT_S = 6.0
LARGE = "large-blocks"
"""Worker kind of hosts whose blocks are twice as large."""


def draw_scenario(seed: int) -> Scenario:
    """Draw a scenario without faults or cancellations."""
    draw = Random(f"scenario {seed}")
    requests = _draw_requests(draw)
    streams = Random(f"streams {seed}")
    is_streamed = streams.random() < STREAMED_RATIO
    if is_streamed:
        requests = tuple(_lengthen(request, streams) for request in requests)
    prefill, decode, mixed = draw.choice(TOPOLOGIES)
    delay_s = draw.choice((0.0001, 0.001, 0.02))
    window = None if is_streamed else _draw_window(seed)
    blocks = _draw_blocks(draw, requests) * (streams.choice((1, 2, 6)) if is_streamed else 1)
    if window is not None and seed % 2:  # room for a window only, which may be less than the longest request
        blocks = min(blocks, -(-window.room_tokens(2 * BLOCK_TOKENS) // BLOCK_TOKENS))
    cluster = ClusterSpec(
        topology=Topology(prefill=prefill, decode=decode, mixed=mixed),
        window=window,
        kv=SimKV(blocks=blocks, block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(step_tokens_max=draw.choice((4, 8, 16, 64)), requests_max=draw.choice((1, 2, 4, 8))),
        cost=SimCost(
            step_overhead_s=0.01,
            prefill_token_s=0.001,
            decode_request_s=0.001,
            context_token_s=0.00001,
            handoff_local_s=0.001,
            handoff_token_s=draw.choice((0.0001, 0.002)),
        ),
        link=SimLink(delay_min_s=delay_s / 4, delay_max_s=delay_s),
        queue_requests_max=draw.choice((5, 1000, 1000, 1000)),
    )
    layers = Random(f"layers {seed}").choice((1, 2, 4, 5))
    preemption = Random(f"preemption {seed}").choice(_PREEMPTION)
    tiers = (_pool(streams),) if is_streamed else _draw_tiers(seed)
    cluster = _spread(cluster, draw, hosts_min=2 if is_streamed else 1)
    cluster = replace(cluster, tiers=tiers, layers=layers, preemption=preemption)
    policy = _draw_policy(draw)
    cluster = replace(cluster, wait_s=Random(f"wait {seed}").choice((60.0, 60.0, 0.3)))
    if is_streamed:
        policy = streams.choice((RESTLESS, RESTLESS, RESTLESS, "central"))
    elif len(cluster.hosts()) > 1 and any(tier.shared for tier in cluster.tiers):
        policy = Random(f"pool {seed}").choice((policy, RESTLESS, "central"))
    scenario = Scenario(seed=seed, cluster=cluster, requests=_with_copies(seed, requests), policy=policy)
    return _with_few_idle_ticks(_with_restless_fleet(scenario))


def _with_few_idle_ticks(scenario: Scenario) -> Scenario:
    """Shorten the longest wait where ticks are frequent. A run ticks until its last deadline: 3,000 times in 60 s."""
    cluster = scenario.cluster
    if cluster.tick_s >= RARE_TICK_S:
        return scenario
    return replace(scenario, cluster=replace(cluster, wait_s=min(cluster.wait_s, FREQUENT_TICKS_WAIT_S)))


def _with_copies(seed: int, requests: tuple[PlannedRequest, ...]) -> tuple[PlannedRequest, ...]:
    """Let the requests of a share of the scenarios be copied to a second host or a shared tier while they decode."""
    copy_tokens = Random(f"copies {seed}").choice((0, 0, 0, 1, 12))
    return tuple(replace(request, copy_tokens=copy_tokens) for request in requests) if copy_tokens else requests


def _with_restless_fleet(scenario: Scenario) -> Scenario:
    """Switch a share of the scenarios to restless roles and scaling."""
    draw = Random(f"fleet {scenario.seed}")
    if draw.random() >= FLEET_RATIO:
        return scenario
    tick_s, worker_start_s = draw.choice((0.02, 0.05, 0.1)), draw.choice((0.0, 0.03, 0.2))
    cluster = replace(scenario.cluster, tick_s=tick_s, worker_start_s=worker_start_s)
    return replace(scenario, cluster=cluster, policy=RESTLESS_FLEET)


def _lengthen(request: PlannedRequest, draw: Random) -> PlannedRequest:
    """Repeat a prompt until it needs several chunks."""
    tokens = draw.randint(16, 64)
    return replace(request, prompt=(request.prompt * tokens)[:tokens])


def _pool(draw: Random) -> SimTier:
    """Draw a tier that all hosts share. It writes a block in about the time in which one or a few are computed."""
    latency_s, token_bytes = draw.choice((0.0001, 0.002, 0.01)), draw.choice((1, 100, 1000))
    return SimTier(
        name="pool",
        blocks=draw.choice((30, 1000, 1000)),
        latency_s=latency_s,
        bytes_per_s=1e6,
        token_bytes=token_bytes,
        shared=True,
        answer_s=0.5,
    )


def _draw_tiers(seed: int) -> tuple[SimTier, ...]:
    """Draw zero to two tiers. Some are too small and drop blocks, some are slower than recomputing, some are shared."""
    draw = Random(f"tiers {seed}")
    names = draw.choice(((), (), ("file",), ("file", "remote"), ("remote",), ("remote",)))
    return tuple(
        SimTier(
            name=name,
            blocks=draw.choice((4, 12, 1000)),
            latency_s=draw.choice((0.0001, 0.002, 0.02)),
            bytes_per_s=1e6,
            token_bytes=draw.choice((1, 100, 1000)),
            shared=name == "remote" and draw.random() < 0.8,
            when=draw.choice(("cached", "cached", "sealed")),
            answer_s=0.5,
        )
        for name in names
    )


def _draw_window(seed: int) -> Window | None:
    """Draw no window, as most models have none, or one that is small compared with the prompts."""
    draw = Random(f"window {seed}")
    tokens = draw.choice((None, None, None, 2, 7, 16))
    return None if tokens is None else Window(tokens=tokens, step_tokens=draw.choice((1, 2)) * BLOCK_TOKENS)


def _draw_policy(draw: Random) -> str:
    """Draw `baton` or `restless` in most cases, and any other policy set in the rest."""
    return draw.choice(("baton", "baton", RESTLESS, RESTLESS, draw.choice(sorted(POLICY_SETS))))


def _spread(cluster: ClusterSpec, draw: Random, *, hosts_min: int) -> ClusterSpec:
    """Place the workers on one host, on two, or each on its own."""
    hosts = max(hosts_min, draw.choice((1, 1, 2, 9)))
    if hosts == 1:
        return cluster
    large = draw.choice((False, False, True))
    workers = tuple(
        SimWorkers(role=view.role, host=f"host-{index % hosts}", kind=LARGE if large and index % hosts == 1 else "")
        for index, view in enumerate(cluster.views())
    )
    kinds = {LARGE: _large_blocks(cluster)} if large and len(workers) > 1 else {}
    return replace(cluster, workers=workers, kinds=kinds, tick_s=draw.choice((0.02, 0.1)))


def _large_blocks(cluster: ClusterSpec) -> SimKind:
    """Return a kind with blocks of twice the size and the same capacity."""
    cost = {"model": "linear", **asdict(cluster.cost)}
    blocks = -(-cluster.kv.blocks // 2)
    return SimKind(cost=cost, kv=SimKV(blocks=blocks, block_tokens=2 * BLOCK_TOKENS))


def _draw_requests(draw: Random) -> tuple[PlannedRequest, ...]:
    shared = [[draw.randrange(BYTE_TOKENS_FROM, 250) for _ in range(draw.randint(4, 16))] for _ in range(2)]
    spread_s = draw.choice((0.0, 0.2, 1.0))
    output_tokens_max = draw.choice((8, 16, 40))
    planned: list[PlannedRequest] = []
    for index in range(draw.randint(5, 16)):
        own = [draw.randrange(BYTE_TOKENS_FROM, 250) for _ in range(draw.randint(1, 12))]
        follows = draw.choice(planned).id if planned and draw.random() < 0.2 else None
        prefix = draw.choice(shared) if follows is None and draw.random() < 0.5 else []
        sampling = Sampling(
            temperature=draw.choice((0.0, 1.0)),
            seed=draw.randrange(100),
            stop_token_ids=(STOP_TOKEN,),
            prompt_logprobs=draw.random() < 0.1,
        )
        planned.append(
            PlannedRequest(
                id=RequestId(f"r{index}"),
                at_s=draw.uniform(0.0, spread_s),
                prompt=draw.choice(planned).prompt if planned and draw.random() < 0.15 else (*prefix, *own),
                output_tokens_max=draw.randint(1, output_tokens_max),
                sampling=sampling,
                priority=draw.choice((0, 0, 0, 1)),
                follows=follows,
            )
        )
    return tuple(planned)


def _draw_blocks(draw: Random, requests: tuple[PlannedRequest, ...]) -> int:
    """Draw the size of an arena: one to six times the longest request."""
    longest: dict[RequestId, int] = {}
    for request in requests:
        before = longest[request.follows] if request.follows is not None else 0
        longest[request.id] = before + len(request.prompt) + request.output_tokens_max
    blocks_min = -(-max(longest.values()) // BLOCK_TOKENS)
    return int(blocks_min * draw.choice((1.0, 1.0, 1.2, 1.5, 2.0, 6.0)))


def with_clients(scenario: Scenario) -> Scenario:
    """Return the scenario with HTTP clients, drawn from the same seed."""
    return replace(scenario, clients=draw_clients(scenario.seed))


def with_faults(scenario: Scenario) -> Scenario:
    """Return the scenario with faults, drawn from the same seed."""
    draw = Random(f"faults {scenario.seed}")
    workers = [view.id for view in scenario.cluster.views()]
    if scenario.policy == RESTLESS_FLEET:
        workers += [WorkerId(f"{role}-added-{number}") for number in range(1, 4) for role in ("prefill", "decode")]
    faults: list[Fault] = []
    faults += [_draw_kill(draw, workers) for _ in range(draw.choice((0, 1, 2, 4)))]
    faults += [_draw_kill_at_step(draw, workers) for _ in range(draw.choice((0, 1, 2)))]
    faults += [_draw_hang(draw, workers) for _ in range(draw.choice((0, 0, 1)))]
    for _ in range(draw.choice((0, 1))):
        at_s, for_s = draw.uniform(0, 0.5), draw.uniform(0, 0.3)
        faults.append(Slow(worker=draw.choice(workers), at_s=at_s, for_s=for_s, factor=draw.choice((2.0, 10.0))))
    for _ in range(draw.choice((0, 1, 2))):
        faults.append(DelaySpike(at_s=draw.uniform(0, 0.8), for_s=draw.uniform(0, 0.1), delay_s=draw.uniform(0, 0.1)))
    for request in draw.sample(scenario.requests, k=min(len(scenario.requests), draw.choice((0, 1, 3, 6)))):
        faults.append(Cancel(request_id=request.id, stage=draw.choice(STAGES), delay_s=draw.choice((0.0, 0.003, 0.05))))
    hosts = scenario.cluster.hosts()
    if len(hosts) > 1:
        for _ in range(draw.choice((0, 1, 1, 2))):
            faults.append(_draw_host_kill(draw, hosts))
        faults += _draw_leaves(scenario.seed, hosts)
        for _ in range(draw.choice((0, 1, 3))):
            one, other = draw.sample(hosts, k=2)
            faults.append(WireCut(one=one, other=other, at_s=draw.uniform(0.0, 0.8), for_s=draw.uniform(0.0, 0.2)))
    for _ in range(draw.choice((0, 0, 1, 3))):
        faults.append(Flip(worker=draw.choice(workers), at_s=draw.uniform(0, 0.8), role=draw.choice(_ROLES)))
    faults += [*_draw_message_faults(scenario.seed, workers), *_draw_restarts(scenario.seed)]
    return replace(scenario, faults=(*faults, *_draw_store_faults(scenario), *_draw_starts_fail(scenario)))


def _draw_message_faults(seed: int, workers: list[WorkerId]) -> list[MessageFault]:
    """Draw control messages that are lost once or come twice."""
    draw = Random(f"messages {seed}")
    return [
        MessageFault(
            worker=draw.choice(workers),
            at_s=draw.uniform(0.0, 0.8),
            link=draw.choice(("to_worker", "from_worker")),
            what=draw.choice(("lost", "repeated")),
            ping_s=draw.choice((0.02, 0.3)),
            death=_draw_death(draw),
        )
        for _ in range(draw.choice((0, 0, 1, 2, 4)))
    ]


def _draw_leaves(seed: int, hosts: list[HostId]) -> list[HostLeave]:
    draw = Random(f"leaves {seed}")
    return [
        HostLeave(host=draw.choice(hosts), at_s=draw.uniform(0.0, 0.8), drain_s=draw.choice((0.0, 0.1, 1.0)))
        for _ in range(draw.choice((0, 0, 1, 2)))
    ]


def _draw_restarts(seed: int) -> list[Restart]:
    draw = Random(f"restarts {seed}")
    return [Restart(at_s=draw.uniform(0.0, 0.8)) for _ in range(draw.choice((0, 0, 0, 1, 2)))]


def _draw_starts_fail(scenario: Scenario) -> list[StartsFail]:
    draw = Random(f"starts fail {scenario.seed}")
    if scenario.policy != RESTLESS_FLEET or draw.random() < 0.5:
        return []
    return [StartsFail(at_s=draw.uniform(0.0, 0.5), for_s=draw.uniform(0.05, 0.5))]


def _draw_store_faults(scenario: Scenario) -> list[StoreFault]:
    draw, cluster = Random(f"store faults {scenario.seed}"), scenario.cluster
    whats: tuple[StoreTrouble, ...] = ("full", "down", "slow", "damaged", "damaged", "lost")
    return [
        StoreFault(
            host=draw.choice(cluster.hosts()),
            tier=tier.name,
            what=draw.choice(whats),
            at_s=draw.uniform(0.0, 0.8),
            for_s=draw.uniform(0.0, 0.5),
        )
        for tier in cluster.tiers
        for _ in range(draw.choice((0, 1, 2)))
    ]


def _draw_death(draw: Random) -> Death:
    return Death(
        reports=draw.choice(REPORTS),
        notice_s=draw.choice((0.0, 0.002, 0.02)),
        restart_s=draw.choice((0.0, 0.0, 0.05, 0.3)),
        late_s=draw.choice((0.0, 0.02, 0.1)),
    )


def _draw_host_kill(draw: Random, hosts: list[HostId]) -> HostKill:
    return HostKill(
        host=draw.choice(hosts),
        at_s=draw.uniform(0.0, 0.8),
        notice_s=draw.choice((0.0, 0.002, 0.05)),
        restart_s=draw.choice((0.0, 0.05, 0.3)),
    )


def _draw_kill(draw: Random, workers: list[WorkerId]) -> Kill:
    return Kill(worker=draw.choice(workers), at_s=draw.uniform(0.0, 0.8), death=_draw_death(draw))


def _draw_kill_at_step(draw: Random, workers: list[WorkerId]) -> KillAtStep:
    moment: KillMoment = "during" if draw.random() < 0.5 else "after"
    return KillAtStep(worker=draw.choice(workers), step=draw.randint(1, 20), moment=moment, death=_draw_death(draw))


def _draw_hang(draw: Random, workers: list[WorkerId]) -> Hang:
    at_s, silent_s = draw.uniform(0.0, 0.5), draw.uniform(0.05, 0.3)
    return Hang(worker=draw.choice(workers), at_s=at_s, silent_s=silent_s, death=_draw_death(draw))
