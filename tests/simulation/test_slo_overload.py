"""Under three times its load a fleet keeps its goodput, and most of what it admits meets the SLO."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.config import Topology
from baton.core.types import Slo
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import CellJob
from baton.lab.sim.faults import Slow, TimedFault
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimCost
from baton.lab.workload.request import Trace, TraceRequest

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
COST = SimCost(step_overhead_s=0.02, prefill_token_s=0.001, decode_request_s=0.004, context_token_s=1e-6)
CASES = {"mixed": (Topology(mixed=1), 2.2), "1P1D": (Topology(prefill=1, decode=1), 3.4)}
"""Topologies, and about the requests/s that each can serve within the SLO."""


def offered(rate_rps: float) -> Trace:
    """Requests of 40 s."""
    draw, at_s, made = Random(1), 0.0, list[TraceRequest]()
    while at_s < 40.0:
        at_s += draw.expovariate(rate_rps)
        made.append(TraceRequest(at_s=at_s, input_tokens=draw.randint(50, 350), output_tokens=draw.randint(20, 80)))
    return Trace(format="made", timing="absolute", requests=tuple(made))


def play(
    topology: Topology, rate_rps: float, *, slo: Slo = SLO, faults: tuple[TimedFault, ...] = ()
) -> list[RequestRecord]:
    spec = ClusterSpec(topology=topology, cost=COST, queue_requests_max=10_000)
    job = CellJob(spec=spec, trace=offered(rate_rps), policy=policy_set("baton"), seed=1, slo=slo, faults=faults)
    return list(play_cell(job))


def is_in_slo(record: RequestRecord, slo: Slo = SLO) -> bool:
    if record.outcome != "finished" or record.ttft_s is None:
        return False
    return record.ttft_s <= slo.ttft_s and (record.tpot_s or 0.0) <= slo.tpot_s


@pytest.mark.parametrize("case", CASES)
def test_three_times_the_load_costs_little_goodput(case: str) -> None:
    """Without an error bar and a margin, the mixed worker kept 6 % of its goodput, and 6 % of what it admitted."""
    topology, capacity_rps = CASES[case]
    peak = max(sum(map(is_in_slo, play(topology, share * capacity_rps))) for share in (0.8, 1.0, 1.2))
    over = play(topology, 3 * capacity_rps)
    assert sum(map(is_in_slo, over)) >= 0.9 * peak
    admitted = [record for record in over if record.outcome != "rejected"]
    assert sum(map(is_in_slo, admitted)) >= 0.9 * len(admitted)  # the margin allows a tenth of misses


def test_a_worker_that_is_three_times_slower_than_priced_keeps_what_it_promises() -> None:
    """The prices are wrong from the beginning. The first requests pay for it; of the others nearly all meet the SLO."""
    [view] = ClusterSpec(topology=Topology(mixed=1)).views()
    slow, slo = Slow(worker=view.id, at_s=0.0, for_s=1e6, factor=3.0), Slo(ttft_s=3.0, tpot_s=0.3)
    records = play(Topology(mixed=1), 2.2, slo=slo, faults=(slow,))
    later = [record for record in records if record.arrival_s > 10 and record.outcome != "rejected"]
    assert len(later) >= 15
    assert sum(is_in_slo(record, slo) for record in later) >= 0.9 * len(later)
