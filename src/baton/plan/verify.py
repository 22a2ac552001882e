"""Play a fleet in the simulator: the real coordinator, batchers and pools decide whether the screening was right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from random import Random
from typing import NamedTuple

from baton.metrics.summary import Results, SloTargets, summarize
from baton.plan.cluster import cluster_spec
from baton.plan.demand import Demand
from baton.plan.search import Fleet, Search, Shape
from baton.sim.replay_trace import replay_trace
from baton.workload.request import Trace, TraceRequest

DERATE, ROUNDS_MAX = 0.93, 6
"""A fleet that misses the SLO in simulation is searched for again with this much less trust, at most so often."""
WARM, JUDGED, AFTER = 4.0, 8.0, 1.0
"""Lifetimes of a request that a simulation has before those that are judged, while they come, and behind them: a queue
that grows slowly is seen late."""
HEADROOM = 1.05
"""Times its rate that a fleet has to carry in simulation: nearer to saturation one sequence of arrivals is kept up with
and the next is not."""
LOOK_REQUESTS, LOOK_MARGIN = 1_000, 0.05
"""A long simulation is played after a short one, unless that is so much below the wanted attainment: it begins with
empty workers and flatters, so who misses it by far misses the long one."""
PLAYED_MAX = 6_000
"""Requests of a simulation, where no more are to be judged: it takes seconds. A fleet with many at once gets shorter
spans."""


class Span(NamedTuple):
    """Requests of a simulation, in order of arrival: those that fill the workers, those that are judged, the rest."""

    warm: int
    judged: int
    after: int

    @property
    def requests(self) -> int:
        return sum(self)

    def shortened(self, requests: int) -> Span:
        """The same with about so many requests, where it has more."""
        share = min(1.0, requests / self.requests)
        return Span(*(ceil(share * each) for each in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A fleet, and what the simulator says about it."""

    fleet: Fleet
    results: Results
    derate: float
    """What was left of the screening's trust."""
    span: Span

    @property
    def attainment_ratio(self) -> float:
        """Share of requests that met the SLO."""
        return self.results.slo.attainment_ratio or 0.0


def verify(search: Search, shape: Shape, *, requests: int, seed: int) -> Verified | None:
    """Search and simulate until the fleet meets the SLO, or the rounds end. None: nothing meets it on paper."""
    last: Verified | None = None
    derate, wanted = search.derate, search.demand.attainment_ratio
    for _ in range(ROUNDS_MAX):
        fleet = replace(search, derate=derate).fleet(shape)
        if fleet is None or not fleet.groups:
            return last
        whole = span(fleet, search.demand, requests=requests, load=HEADROOM)
        last = _verified(search, fleet, whole.shortened(LOOK_REQUESTS), derate=derate, seed=seed)
        if last.span != whole and last.attainment_ratio >= wanted - LOOK_MARGIN:
            last = _verified(search, fleet, whole, derate=derate, seed=seed)
        if last.span == whole and last.attainment_ratio >= wanted:
            return last
        derate *= DERATE
    return last


def _verified(search: Search, fleet: Fleet, judged: Span, *, derate: float, seed: int) -> Verified:
    results = simulate(search, fleet, judged, seed=seed, load=HEADROOM)
    return Verified(fleet=fleet, results=results, derate=derate, span=judged)


def simulate(
    search: Search, fleet: Fleet, judged: Span, *, seed: int, load: float = 1.0, promised: bool = False
) -> Results:
    """Play Poisson arrivals of the demand's lengths at `load` times the fleet's rate, and judge those of `judged`.

    `promised`: requests are promised the SLO, so that what is predicted to miss it is refused. If not, all are taken.
    """
    demand = search.demand
    trace = sample_trace(demand, rate_rps=load * fleet.rate_rps, requests=judged.requests, seed=seed)
    spec = cluster_spec(fleet, same_host=search.same_host)
    records = replay_trace(spec, trace, policy="baton", seed=seed, slo=demand.slo if promised else None)
    steady = sorted(records, key=lambda record: record.arrival_s)[judged.warm : judged.warm + judged.judged]
    return summarize(steady, slo=SloTargets(ttft_s=demand.slo.ttft_s, tpot_s=demand.slo.tpot_s), wall_s=0.0)


def span(fleet: Fleet, demand: Demand, *, requests: int, load: float = 1.0) -> Span:
    """How long a simulation has to be: workers that start empty, or that get nothing more to do, keep any promise.

    At least `requests` are judged.
    """
    at_once = max(1e-9, load * fleet.rate_rps * lifetime_s(fleet, demand))
    warm, judged, after = WARM * at_once, JUDGED * at_once, AFTER * at_once
    share = min(1.0, max(PLAYED_MAX / (warm + judged + after), requests / judged))
    return Span(ceil(share * warm), max(requests, ceil(share * judged)), ceil(share * after))


def lifetime_s(fleet: Fleet, demand: Demand) -> float:
    """Of a mean request, from its arrival to its last token, as slow as the screening lets it be."""
    ttft_s = max(group.capacity.ttft_s for group in fleet.groups)
    return ttft_s + demand.output_tokens * max(group.capacity.tpot_s for group in fleet.groups)


def span_words(fleet: Fleet, played: Span, demand: Demand) -> str:
    """Say how long the simulation was, and where that was too short for workers to be as full as they get."""
    lives = played.warm / max(1e-9, fleet.rate_rps * lifetime_s(fleet, demand))
    words = f"simulated: {played.judged} requests were judged, after {played.warm} that filled the workers"
    if lives > 0.99 * WARM:
        return words
    return (
        f"{words}, which is {lives:.1f} lifetimes of a request and not {WARM:g}: they may get fuller; --requests "
        f"{ceil(played.judged * WARM / lives)} plays that long"
    )


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
