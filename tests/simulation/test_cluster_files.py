"""The clusters of published set-ups: each loads, holds its model, and serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import read_spec
from baton.lab.workload.request import Trace, TraceRequest

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"
FILES = sorted(path.name for path in CLUSTERS.iterdir())
SET_UPS = (
    "arrow",
    "deepseek",
    "distserve",
    "dynamo",
    "llumnix",
    "lmcache",
    "mooncake",
    "sarathi",
    "splitwise",
    "tetri",
    "vtc",
)


def test_every_published_set_up_has_a_file() -> None:
    assert all(any(name.startswith(set_up) for name in FILES) for set_up in SET_UPS)


@pytest.mark.parametrize("name", FILES)
def test_a_cluster_file_serves_twenty_requests(name: str) -> None:
    """Two a second, 600 tokens in and 12 out: every answer is whole, and takes the time that it takes."""
    requests = tuple(TraceRequest(at_s=place / 2, input_tokens=600, output_tokens=12) for place in range(20))
    trace = Trace(format="test", timing="absolute", requests=requests)
    records = replay_trace(read_spec(CLUSTERS / name), trace, policy="baton", seed=0)
    assert [record.outcome for record in records] == ["finished"] * 20
    assert {record.output_tokens for record in records} == {12}
    assert all((record.ttft_s or 0.0) > 0 and (record.tpot_s or 0.0) > 0 for record in records)
