"""Scaling by forecasts of statsmodels, in a whole cluster: who sees a rise coming asks for workers earlier."""

from __future__ import annotations

from math import sqrt
from statistics import fmean

import pytest
from msgspec.structs import replace

from baton.core.config import Plugin, PolicyConfig, Topology
from baton.core.messages import StartWorker
from baton.decide.control.decision_log import Decision
from baton.decide.policy.policy_sets import policy_set
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec
from baton.lab.workload.request import Trace, TraceRequest

START_S = 40.0
SPEC = ClusterSpec(topology=Topology(mixed=1), worker_start_s=START_S, tick_s=5.0)
RECENT = "recent-demand"


def ramp() -> Trace:
    """From one request in four seconds to 2.25 a second, over 200 s."""
    times_s = [100 * (sqrt(0.0625 + number / 50) - 0.25) for number in range(250)]
    requests = tuple(TraceRequest(at_s=at_s, input_tokens=200, output_tokens=6) for at_s in times_s)
    return Trace(format="test", timing="absolute", requests=requests)


def scaling(forecast: str, options: dict[str, object]) -> PolicyConfig:
    chosen = {"forecast": forecast, "forecast_options": options, "start_s": START_S}
    return replace(policy_set("baton"), scaling=Plugin(use="forecast-scaling", options=chosen))


def played(policy: PolicyConfig, spec: ClusterSpec = SPEC) -> tuple[list[float], float]:
    """When workers were asked for, and the mean TTFT."""
    asked_s: list[float] = []

    def tap(decision: Decision) -> None:
        asked_s.extend(decision.now_s for command in decision.commands if isinstance(command, StartWorker))

    records = replay_trace(spec, ramp(), policy=policy, seed=0, tap=tap)
    return asked_s, fmean(record.ttft_s or 0.0 for record in records)


def test_a_host_gets_no_more_workers_than_it_can_run() -> None:
    """Before, hosts of the simulator stated no limit, and a trial of a policy started more than a live host would."""
    policy = scaling(RECENT, {})
    assert len(played(policy)[0]) == len(played(policy, replace(SPEC, workers_max=2))[0]) == 1
    assert played(policy, replace(SPEC, workers_max=1))[0] == []


@pytest.mark.parametrize("kind", ["arima", "exponential-smoothing"])
def test_who_sees_the_rise_coming_asks_earlier_and_answers_sooner(kind: str) -> None:
    pytest.importorskip("statsmodels", reason="no package statsmodels: pip install 'baton[forecast]'")
    late_s, late_ttft_s = played(scaling(RECENT, {}))
    asked_s, ttft_s = played(scaling(kind, {"bin_s": 10.0}))
    assert asked_s[0] < late_s[0] - 10
    assert ttft_s < late_ttft_s
