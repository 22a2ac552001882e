"""Simulate a planned fleet, and stop early once the result is known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from random import Random
from typing import NamedTuple

import msgspec
from msgspec import structs

from baton.decide.policy.policy_sets import policy_set
from baton.lab.plan.cluster import BLOCK_TOKENS, cluster_spec
from baton.lab.plan.demand import LengthClass, WorkloadDemand
from baton.lab.plan.planned_fleet import PlannedFleet
from baton.lab.plan.search import Search
from baton.lab.report.summary import RequestRecord, Results, SloTargets, summarize
from baton.lab.sim.cells import CellJob
from baton.lab.sim.replay_trace import play_cell
from baton.lab.workload.request import Trace, TraceRequest

WARM, JUDGED, AFTER = 4.0, 8.0, 1.0
"""Lengths of the three phases of a simulation (warm-up, judged, after), in mean request lifetimes. They are long enough
to show a queue that grows slowly."""
SEQUENCES_MAX = 3
"""Maximum number of arrival sequences that are judged together: a burst may occur in one and not in another."""
PLAYED_MAX = 6_000
"""Bound on the requests of all sequences. Only the judged requests may exceed it.

A fleet with many concurrent requests gets fewer sequences, then a shorter one, because bursts matter less for it.
"""
_POLICY = policy_set("baton")


class PlayLength(NamedTuple):
    """Number of sequences, and the requests of each in warm-up, in the judged window, and after it."""

    warm: int
    judged: int
    after: int
    sequences: int = 1

    @property
    def requests(self) -> int:
        """Requests of one sequence."""
        return self.warm + self.judged + self.after

    def shortened(self, requests: int) -> PlayLength:
        """Return the length of a single sequence with about `requests` requests at most."""
        share = min(1.0, requests / self.requests)
        return PlayLength(ceil(share * self.warm), ceil(share * self.judged), ceil(share * self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResults:
    """Simulation results of a fleet."""

    length: PlayLength
    results: Results
    """Metrics of all sequences, joined one after the other in time."""
    ratios: tuple[float, ...]
    """Share of judged requests within the SLO, for each sequence."""

    @property
    def attainment_ratio(self) -> float:
        """Share of judged requests within the SLO, over all sequences."""
        return self.results.slo.attainment_ratio or 0.0


@dataclass(slots=True, kw_only=True)
class _Judge:
    """Collects the requests that arrive in a window. Stops the simulation once all are closed or too many are late."""

    targets: SloTargets
    from_s: float
    until_s: float
    requests: int
    late_max: int
    kept: list[RequestRecord] = field(default_factory=list[RequestRecord])
    late: int = 0

    def has_enough(self, record: RequestRecord) -> bool:
        if self.from_s <= record.arrival_s < self.until_s:
            self.kept.append(record)
            self.late += not self.targets.met_by(record)
        return len(self.kept) == self.requests or self.late > self.late_max


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSimulator:
    """Simulator of one search's fleets. It caches results, so the number of distinct calls bounds its size."""

    search: Search
    requests: int
    """Lower bound on the judged requests of a fleet."""
    seed: int
    promised: bool = True
    """Requests carry the SLO, and the server rejects those predicted to miss it, unless `play` says otherwise."""
    drawn: tuple[LengthClass, ...] = ()
    """Requests of a trace to draw lengths from. Empty: draw from the demand's classes."""
    _known: dict[bytes, FleetResults | None] = field(default_factory=dict[bytes, "FleetResults | None"], repr=False)

    def play(
        self,
        fleet: PlannedFleet,
        *,
        load: float,
        promised: bool | None = None,
        wanted_ratio: float = 0.0,
        requests_max: int | None = None,
    ) -> FleetResults | None:
        """Return the results for Poisson arrivals at `load` times the fleet's rate.

        `promised` replaces the simulator's own value. Spare workers are left out. The simulation stops and returns
        None once the share within the SLO cannot reach `wanted_ratio`. `requests_max` bounds the simulation
        to one sequence.
        """
        fleet, promised = fleet.without_spares(), self.promised if promised is None else promised
        judged = play_length(fleet, self.search.demand, requests=self.requests, load=load)
        judged = judged if requests_max is None else judged.shortened(requests_max)
        spec = cluster_spec(fleet, same_host=self.search.same_host)
        rate_rps = load * fleet.rate_rps
        key = msgspec.json.encode((spec, rate_rps, judged, promised, wanted_ratio))
        if key not in self._known:
            slo = self.search.demand.slo if promised else None
            traces = [self._trace(judged, rate_rps, self.seed + number) for number in range(judged.sequences)]
            jobs = [
                CellJob(spec=spec, trace=trace, policy=_POLICY, seed=self.seed + number, slo=slo)
                for number, trace in enumerate(traces)
            ]
            self._known[key] = _played(jobs, judged, self.search.demand, wanted_ratio)
        return self._known[key]

    def draws(self, fleet: PlannedFleet, *, loads: Sequence[float], count: int, seed: int) -> list[list[Trace]]:
        """Return `count` sequences of `requests` requests, each at these shares of the fleet's rate."""
        demand, drawn = self.search.demand, self.drawn or self.search.demand.lengths
        return [
            [
                sample_trace(demand, drawn, rate_rps=load * fleet.rate_rps, requests=self.requests, seed=seed + number)
                for load in loads
            ]
            for number in range(count)
        ]

    def _trace(self, judged: PlayLength, rate_rps: float, seed: int) -> Trace:
        demand = self.search.demand
        drawn = self.drawn or demand.lengths
        return sample_trace(demand, drawn, rate_rps=rate_rps, requests=judged.requests, seed=seed)


def _played(
    jobs: Sequence[CellJob], judged: PlayLength, demand: WorkloadDemand, wanted_ratio: float
) -> FleetResults | None:
    """Run the sequences in order. Return None as soon as too many requests are late."""
    targets = SloTargets(ttft_s=demand.slo.ttft_s, tpot_s=demand.slo.tpot_s)
    late_max = judged.sequences * judged.judged - ceil(wanted_ratio * judged.sequences * judged.judged - 1e-6)
    kept: list[RequestRecord] = []
    ratios: list[float] = []
    for job in jobs:
        arrivals = job.trace.requests
        judge = _Judge(
            targets=targets,
            from_s=arrivals[judged.warm].at_s,
            until_s=arrivals[judged.warm + judged.judged].at_s,
            requests=judged.judged,
            late_max=late_max,
        )
        play_cell(job, enough=judge.has_enough)
        late_max -= judge.late
        if late_max < 0:
            return None
        ratios.append(1 - judge.late / judged.judged)
        kept += _shifted(judge.kept, max((record.end_s for record in kept), default=judge.from_s) - judge.from_s)
    return FleetResults(length=judged, results=summarize(kept, slo=targets, wall_s=0.0), ratios=tuple(ratios))


def _shifted(records: Sequence[RequestRecord], by_s: float) -> Sequence[RequestRecord]:
    """Return the records with all times `by_s` seconds later."""
    if not by_s:
        return records
    return [
        structs.replace(
            record,
            arrival_s=record.arrival_s + by_s,
            end_s=record.end_s + by_s,
            token_times_s=array("d", [at_s + by_s for at_s in record.token_times_s]),
        )
        for record in records
    ]


def play_length(fleet: PlannedFleet, demand: WorkloadDemand, *, requests: int, load: float = 1.0) -> PlayLength:
    """Return the simulation length that fills the workers and judges at least `requests` requests.

    Workers that start empty, or that receive no further requests, meet any SLO. The phases before and after the judged
    window prevent this.
    """
    at_once = max(1e-9, load * fleet.rate_rps * lifetime_s(fleet, demand))
    whole = (WARM + JUDGED + AFTER) * at_once
    sequences = min(SEQUENCES_MAX, max(1, int(PLAYED_MAX / whole)))
    least = ceil(requests / sequences)
    share = min(1.0, max(PLAYED_MAX / whole, least / (JUDGED * at_once)))
    judged = max(least, ceil(share * JUDGED * at_once))
    return PlayLength(ceil(share * WARM * at_once), judged, ceil(share * AFTER * at_once), sequences)


def lifetime_s(fleet: PlannedFleet, demand: WorkloadDemand) -> float:
    """Return the time from a mean request's arrival to its last token, at the screening's TTFT and TPOT."""
    ttft_s = max(group.capacity.ttft_s for group in fleet.groups)
    return ttft_s + demand.output_tokens * max(group.capacity.tpot_s for group in fleet.groups)


def describe_results(fleet: PlannedFleet, played: FleetResults, demand: WorkloadDemand) -> str:
    """Return a sentence with the simulation length and results, and a hint if it was too short to fill the workers."""
    judged = played.length
    lives = judged.warm / max(1e-9, fleet.rate_rps * lifetime_s(fleet, demand))
    low, high = min(played.ratios), max(played.ratios)
    met = f"{low:.1%} to {high:.1%} of each" if low < high else f"{low:.1%}"
    words = (
        f"simulated: {_sequences(judged.sequences)} of {judged.judged} judged requests, after {judged.warm} that "
        f"filled the workers; {met} met the SLO"
    )
    if lives > 0.99 * WARM:
        return words
    return (
        f"{words}. The workers filled for {lives:.1f} mean request lifetimes instead of {WARM:g}, so they may get "
        f"fuller: --requests {ceil(judged.judged * WARM / lives)} simulates long enough"
    )


def _sequences(count: int) -> str:
    return "one sequence of arrivals" if count == 1 else f"{count} sequences of arrivals"


def sample_trace(
    demand: WorkloadDemand, drawn: Sequence[LengthClass], *, rate_rps: float, requests: int, seed: int
) -> Trace:
    """Return a trace of lengths drawn from `drawn` at Poisson times, scaled to the exact mean rate.

    Prompts begin with the tokens that the demand expects in the prefix cache, which are the same for all. The first
    request of each worker computes them.
    """
    draw = Random(seed)
    lengths = draw.choices(drawn, [each.weight for each in drawn], k=requests)
    blocks = {each: (each.input_tokens - demand.new_tokens(each)) // BLOCK_TOKENS for each in set(lengths)}
    ids = tuple(range(max(blocks.values())))
    prefixes = {count: ids[:count] for count in blocks.values()}  # shared, because each id takes 36 bytes
    ends = list(accumulate(draw.expovariate(1.0) for _ in range(requests)))
    stretch_s = requests / rate_rps / ends[-1]
    found = [
        TraceRequest(
            at_s=end * stretch_s,
            input_tokens=each.input_tokens,
            output_tokens=each.output_tokens,
            prefix_ids=prefixes[blocks[each]],
            prefix_block_tokens=BLOCK_TOKENS,
        )
        for end, each in zip(ends, lengths, strict=True)
    ]
    return Trace(format="planned", timing="absolute", requests=tuple(found))
