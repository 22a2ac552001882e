"""Scaling by the time of day, over two days at the default tick: the second day's rise is seen before it comes."""

from __future__ import annotations

from statistics import fmean

import pytest
from msgspec.structs import replace

from baton.core.config import Plugin, PolicyConfig, Topology
from baton.core.messages import StartWorker
from baton.decide.control.decision_log import Decision, replay
from baton.decide.policy.forecast import DAY_S
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cluster import fresh_cluster
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest

BUSY_S, BUSY_FOR_S = 1800.0, 1200.0
SPEC = ClusterSpec(topology=Topology(mixed=1), worker_start_s=40.0)
SCALING = Plugin(
    use="forecast-scaling",
    options={"forecast": "time-of-day", "start_s": 600.0},
)
POLICY: PolicyConfig = replace(policy_set("baton"), scaling=SCALING)


def two_days() -> Trace:
    """Next to nothing, but for twenty minutes at the same time of both days."""
    quiet_s = [float(at_s) for at_s in range(300, int(DAY_S + BUSY_S + BUSY_FOR_S), 300)]
    busy_s = [day_s + BUSY_S + number for day_s in (0.0, DAY_S) for number in range(int(BUSY_FOR_S))]
    requests = tuple(TraceRequest(at_s=at_s, input_tokens=800, output_tokens=6) for at_s in sorted(quiet_s + busy_s))
    return Trace(format="test", timing="absolute", requests=requests)


def played(spec: ClusterSpec) -> tuple[list[Decision], list[RequestRecord]]:
    decisions: list[Decision] = []

    return decisions, replay_trace(spec, two_days(), policy=POLICY, seed=0, tap=decisions.append)


def asked_s(decisions: list[Decision]) -> list[float]:
    return [
        decision.now_s for decision in decisions for command in decision.commands if isinstance(command, StartWorker)
    ]


def ttft_s(records: list[RequestRecord], from_s: float) -> float:
    return fmean(record.ttft_s or 0.0 for record in records if from_s <= record.arrival_s < from_s + BUSY_FOR_S)


@pytest.mark.deep
def test_the_second_day_sees_the_first_at_the_default_tick() -> None:
    decisions, records = played(SPEC)
    asked = asked_s(decisions)
    assert asked[0] > BUSY_S, "nobody knows the first day"
    assert any(DAY_S < at_s < DAY_S + BUSY_S for at_s in asked)
    assert ttft_s(records, DAY_S + BUSY_S) < ttft_s(records, BUSY_S)


def test_what_was_decided_by_the_first_day_is_decided_again_in_a_replay() -> None:
    """INV-7, with windows that were put together."""
    spec = replace(SPEC, tick_s=20.0)
    decisions, _ = played(spec)
    assert any(DAY_S < at_s < DAY_S + BUSY_S for at_s in asked_s(decisions))
    agreed, difference = replay(fresh_cluster(spec, configured_policies(POLICY, spec)), decisions)
    assert (agreed, difference) == (len(decisions), None)
