"""Cells behind the router of `baton cells`: the live state machine, one event loop, prefixes in one cell."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from baton.core.config import Topology
from baton.core.types import RequestId
from baton.decide.control.cell_router import CellRules
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.routed_cells import RoutedCells
from baton.lab.sim.spec import ClusterSpec, SimKV, load_spec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec(topology=Topology(mixed=2), kv=SimKV(blocks=512), cells=4, router=CellRules())


def trace(count: int, *, prefixes: int = 7, gap_s: float = 0.05) -> Trace:
    requests = tuple(
        TraceRequest(
            at_s=number * gap_s,
            input_tokens=64,
            output_tokens=5,
            prefix_ids=(number % prefixes, 100 + number),
            prefix_block_tokens=1024,
        )
        for number in range(count)
    )
    return Trace(format="test", timing="absolute", requests=requests)


def test_prefixes_are_found_where_requests_that_are_dealt_in_turn_miss_them() -> None:
    given = trace(80)
    records = replay_trace(SPEC, given, policy="baton", seed=3)
    in_turn = replay_trace(replace(SPEC, router=None), given, policy="baton", seed=3)
    assert Counter(record.outcome for record in records) == {"finished": 80}
    assert [record.end_s for record in records] == sorted(record.end_s for record in records)
    hits, fewer = (sum(record.cached_tokens or 0 for record in each) for each in (records, in_turn))
    assert hits > fewer > 0
    assert replay_trace(SPEC, given, policy="baton", seed=3) == records


def test_a_hot_prefix_spreads_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: Counter[int] = Counter()
    place = RoutedCells.place

    def noted(cells: RoutedCells, request_id: RequestId, key: int) -> SimCluster:
        cluster = place(cells, request_id, key)
        placed[id(cluster)] += 1
        return cluster

    monkeypatch.setattr(RoutedCells, "place", noted)
    spec = replace(SPEC, router=CellRules(load_ratio=1.0, free_requests=0))
    assert len(replay_trace(spec, trace(40, prefixes=1, gap_s=0.0), policy="baton", seed=3)) == 40
    assert sorted(placed.values()) == [10] * 4


def test_a_full_cell_refuses_and_another_one_serves() -> None:
    spec = replace(SPEC, queue_requests_max=2, router=CellRules(load_ratio=100.0, free_requests=100))
    records = replay_trace(spec, trace(12, prefixes=1, gap_s=0.0), policy="baton", seed=3)
    outcomes = Counter(record.outcome for record in records)
    assert outcomes == {"finished": 8, "rejected": 4}, "2 in each of 4 cells, where one cell alone would serve 2"


def test_the_rules_are_a_section_of_the_cluster_file() -> None:
    spec = load_spec("cells = 2\n[topology]\nmixed = 1\n[router]\nload_ratio = 1.5\n")
    assert spec.router == CellRules(load_ratio=1.5)
