"""Play a fleet in the simulator: the real coordinator, batchers and pools decide whether the screening was right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from msgspec import structs

from baton.core.config import BatchLimits
from baton.cost.handoff import Wire
from baton.metrics.summary import Results, SloTargets, summarize
from baton.plan.demand import Demand
from baton.plan.search import Fleet, Group, Search, Shape
from baton.sim.replay_trace import replay_trace
from baton.sim.spec import ClusterSpec, SimKind, SimKV, SimWorkers
from baton.workload.request import Trace, TraceRequest

DERATE, ROUNDS_MAX = 0.93, 6
"""A fleet that misses the SLO in simulation is searched for again with this much less trust, at most so often."""
BLOCK_TOKENS = 16
REQUESTS_MAX = 256
"""Decoding requests of one worker at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A fleet, and what the simulator says about it."""

    fleet: Fleet
    results: Results
    derate: float
    """What was left of the screening's trust."""

    @property
    def attainment_ratio(self) -> float:
        """Share of requests that met the SLO."""
        return self.results.slo.attainment_ratio or 0.0


def verify(search: Search, shape: Shape, *, requests: int, seed: int) -> Verified | None:
    """Search and simulate until the fleet meets the SLO, or the rounds end. None: nothing meets it on paper."""
    last: Verified | None = None
    derate = search.derate
    for _ in range(ROUNDS_MAX):
        fleet = replace(search, derate=derate).fleet(shape)
        if fleet is None or not fleet.groups:
            return last
        last = Verified(fleet=fleet, results=simulate(search, fleet, requests=requests, seed=seed), derate=derate)
        if last.attainment_ratio >= search.demand.attainment_ratio:
            return last
        derate *= DERATE
    return last


def simulate(
    search: Search, fleet: Fleet, *, requests: int, seed: int, load: float = 1.0, promised: bool = False
) -> Results:
    """Play Poisson arrivals of the demand's lengths at `load` times the fleet's rate.

    `promised`: requests are promised the SLO, so that what is predicted to miss it is refused. If not, all are taken.
    """
    demand = search.demand
    trace = sample_trace(demand, rate_rps=load * fleet.rate_rps, requests=requests, seed=seed)
    spec = cluster_spec(fleet, same_host=search.same_host)
    records = replay_trace(spec, trace, policy="baton", seed=seed, slo=demand.slo if promised else None)
    return summarize(records, slo=SloTargets(ttft_s=demand.slo.ttft_s, tpot_s=demand.slo.tpot_s), wall_s=0.0)


def sample_trace(demand: Demand, *, rate_rps: float, requests: int, seed: int) -> Trace:
    """Requests as long as the demand's, at Poisson times, stretched so that their mean rate is exactly this one.

    Cached tokens are left out of the prompts.
    """
    draw = Random(seed)
    weights = [each.weight for each in demand.lengths]
    lengths = draw.choices(demand.lengths, weights, k=requests)
    ends = list(accumulate(draw.expovariate(1.0) for _ in range(requests)))
    stretch_s = requests / rate_rps / ends[-1]
    found = [
        TraceRequest(at_s=end * stretch_s, input_tokens=demand.new_tokens(each), output_tokens=each.output_tokens)
        for end, each in zip(ends, lengths, strict=True)
    ]
    return Trace(format="planned", timing="absolute", requests=tuple(found))


def cluster_spec(fleet: Fleet, *, same_host: bool) -> ClusterSpec:
    """The fleet as a cluster file: every worker has its own GPUs, and so an arena of its own."""
    return ClusterSpec(
        kinds={kind_name(group): _kind(group, same_host=same_host) for group in fleet.groups},
        workers=tuple(
            SimWorkers(role=group.role, count=group.workers, kind=kind_name(group), host="each")
            for group in fleet.groups
        ),
        queue_requests_max=100_000,
    )


def kind_name(group: Group) -> str:
    """Of the workers of a group, such as `prefill-a100-80g-sxm-tp2`."""
    return f"{group.role}-{group.option.name.lower().replace(' ', '-')}"


def _kind(group: Group, *, same_host: bool) -> SimKind:
    blocks = max(1, group.option.facts.kv_tokens_max // BLOCK_TOKENS)
    requests = max(1, min(REQUESTS_MAX, round(2 * group.capacity.requests) + 64))
    return SimKind(
        cost=cost_section(group, same_host=same_host),
        kv=SimKV(blocks=blocks, block_tokens=BLOCK_TOKENS),
        batch=BatchLimits(step_tokens_max=step_tokens_max(group), requests_max=requests),
    )


def step_tokens_max(group: Group) -> int:
    """What the plan asks of the batcher: at least a token for every request that may decode at once."""
    return max(group.capacity.step_tokens_max, 2 * round(group.capacity.requests) + 8)


def cost_section(group: Group, *, same_host: bool) -> dict[str, Any]:
    """The worker as `load_cost` takes it."""
    cost = group.option.cost
    gpus, hardware = cost.parallel.gpus, cost.hardware
    wire = cost.wire
    if same_host:
        wire = Wire(bytes_per_s=hardware.intra_node_bytes_per_s * gpus)
    section: dict[str, Any] = {
        "model": "roofline", "llm": structs.asdict(cost.model), "hardware": hardware.name,
        "engine": structs.asdict(cost.engine), "weights": cost.precision.weights, "kv": cost.precision.kv,
        **structs.asdict(cost.parallel),
    }  # fmt: skip
    if wire is not None:
        section["wire"] = structs.asdict(wire)
    return section
