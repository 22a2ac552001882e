"""The default policy's predictions of TTFT and TPOT are near what the simulator measures."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from baton.core.config import Topology
from baton.core.types import Slo
from baton.lab.report.prediction_table import PredictionRatios, accuracy
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import read_spec
from baton.lab.workload.request import Trace, TraceRequest

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
SLO = Slo(ttft_s=1.0, tpot_s=0.03)
CASES = {
    "2P2D": ("one-gpu-host.toml", Topology(prefill=2, decode=2), 30.0),
    "mixed": ("one-gpu-host.toml", Topology(mixed=4), 25.0),
    "70B, 2 mixed": ("dynamo-llama70b-8xh100-mixed.yaml", None, 2.0),
}
"""Cluster, another topology, and about 0.7 of the requests/s that it carries."""


def offered(rate_rps: float) -> Trace:
    draw, at_s, made = Random(3), 0.0, list[TraceRequest]()
    for _ in range(200):
        at_s += draw.expovariate(rate_rps)
        made.append(TraceRequest(at_s=at_s, input_tokens=draw.randint(200, 1800), output_tokens=draw.randint(50, 350)))
    return Trace(format="made", timing="absolute", requests=tuple(made))


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_within_15_percent_at_p50_and_35_at_p90(case: str) -> None:
    file, topology, rate_rps = CASES[case]
    spec, ratios = read_spec(CLUSTERS / file), PredictionRatios()
    spec = spec if topology is None else replace(spec, topology=topology)
    replay_trace(spec, offered(rate_rps), policy="baton", seed=0, slo=SLO, tap=ratios.take)
    for actual in (ratios.ttft, ratios.tpot):
        found = accuracy(actual)
        assert found is not None
        assert found.requests >= 150
        assert found.error_p50 <= 0.15
        assert found.error_p90 <= 0.35
