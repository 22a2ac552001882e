"""Cells: each with a server of its own; together they play every request once, and a session stays in one of them."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import asdict, replace

from baton.cli.sim import play_cells
from baton.core.config import Plugin, PolicyConfig, Topology
from baton.core.errors import ConfigError
from baton.core.types import Slo
from baton.decide.policy.policy_sets import policy_set
from baton.lab.report.summary import RequestRecord
from baton.lab.sim.cells import cell_jobs, decode_records, encode_records, split_trace
from baton.lab.sim.replay_trace import replay_trace
from baton.lab.sim.spec import ClusterSpec, load_spec
from baton.lab.workload.request import Trace, TraceRequest

SPEC = ClusterSpec(topology=Topology(mixed=1))


def trace(count: int, *, sessions: int = 0) -> Trace:
    requests = tuple(
        TraceRequest(
            at_s=number * 0.1,
            input_tokens=10 + number,
            output_tokens=5,
            session=f"s{number % sessions}" if sessions else "",
        )
        for number in range(count)
    )
    return Trace(format="test", timing="absolute", requests=requests)


def test_requests_are_dealt_in_turn_and_none_is_lost() -> None:
    dealt = split_trace(trace(10), 3)
    assert [len(part.requests) for part in dealt] == [4, 3, 3]
    assert sorted(request.at_s for part in dealt for request in part.requests) == [n * 0.1 for n in range(10)]


def test_turns_of_a_session_meet_in_one_cell() -> None:
    dealt = split_trace(trace(60, sessions=12), 4)
    homes = {request.session: number for number, part in enumerate(dealt) for request in part.requests}
    for number, part in enumerate(dealt):
        assert all(homes[request.session] == number for request in part.requests)
    assert len(set(homes.values())) > 1, "all in one cell"


def test_many_cells_play_what_each_of_them_would_alone() -> None:
    """Records of the whole are those of the parts, in the order in which requests closed."""
    whole = replay_trace(replace(SPEC, cells=3), trace(12), policy="baton", seed=4)
    parts = [
        replay_trace(SPEC, part, policy="baton", seed=4 + number)
        for number, part in enumerate(split_trace(trace(12), 3))
    ]
    ends = [record.end_s for record in whole]
    assert ends == sorted(ends)
    assert sorted(ends) == sorted(record.end_s for part in parts for record in part)
    assert {record.outcome for record in whole} == {"finished"}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_number_of_processes_makes_no_difference(processes: int) -> None:
    spec, slo = replace(SPEC, cells=3), Slo(ttft_s=0.5, tpot_s=0.2)
    alone = replay_trace(spec, trace(12), policy="baton", seed=4, slo=slo)
    jobs = cell_jobs(spec, trace(12), policy_set("baton"), seed=4, slo=slo)
    assert play_cells(jobs, processes=processes) == alone


def test_a_process_tells_everything_of_a_request() -> None:
    """A field that a record has, and that is not sent on, would be its default in a cluster of cells alone."""
    full = RequestRecord(
        arrival_s=1.0, end_s=4.0, outcome="rejected", reject="slo", failure="why", input_tokens=7,
        token_times_s=array("d", [2.0, 3.5]), cached_tokens=3, cut_tokens=2, slo=Slo(ttft_s=0.5, tpot_s=0.2),
        tenant="a",
    )  # fmt: skip
    bare = RequestRecord(arrival_s=0.0, end_s=0.0, outcome="finished", input_tokens=0)
    assert not [field for field, value in asdict(full).items() if value == asdict(bare)[field]]
    assert decode_records(encode_records([full, bare])) == [full, replace(bare, token_times_s=array("d"))]


def test_a_process_that_fails_is_heard() -> None:
    policy = PolicyConfig(routing=Plugin(use="nowhere:Nobody"))
    with pytest.raises(ConfigError, match=r"the simulation of a cell exited with 1: .*nowhere"):
        play_cells(cell_jobs(replace(SPEC, cells=2), trace(2), policy, seed=0, slo=None), processes=2)


def test_a_log_is_of_one_server() -> None:
    with pytest.raises(ConfigError, match="cells = 2"):
        replay_trace(replace(SPEC, cells=2), trace(2), policy="baton", seed=0, tap=lambda decision: None)


def test_a_cluster_has_a_cell() -> None:
    with pytest.raises(ConfigError, match="cells is 0, but must be at least 1"):
        load_spec("cells = 0\n[topology]\nmixed = 1\n")
