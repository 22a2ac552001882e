"""The bound of VTC (theorem 4.4) on mixed and on disaggregated fleets, and while workers change roles."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.config import BatchLimits, Plugin, PolicyConfig, Topology
from baton.core.types import WorkerId
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.report.service_gap import gap_bound, largest_gap
from baton.lab.sim.cells import CellJob
from baton.lab.sim.faults import Death, Flip, Kill, TimedFault
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimKV
from baton.lab.workload.request import Trace, TraceRequest

MEMORY_TOKENS = 4_000
VTC = POLICY_SETS["vtc"]
FCFS = replace(VTC, fairness=Plugin(use="fcfs"))
FLEETS = [Topology(mixed=1), Topology(prefill=1, decode=1), Topology(prefill=2, decode=2), Topology(prefill=2, mixed=1)]
Lengths = tuple[int, int]
"""Prompt and output tokens of every request of a tenant."""


def gap(
    fleet: Topology, policy: PolicyConfig, one: Lengths, other: Lengths, faults: tuple[TimedFault, ...] = ()
) -> float:
    """Return the largest gap between two tenants that send all their requests within the first seconds."""
    sizes = {"one": one, "other": other}
    requests = [
        TraceRequest(at_s=place * 0.01, input_tokens=prompt, output_tokens=output, tenant=tenant)
        for place in range(150)
        for tenant, (prompt, output) in sizes.items()
    ]
    spec = ClusterSpec(
        topology=fleet,
        kv=SimKV(blocks=MEMORY_TOKENS // 16, block_tokens=16),
        batch=BatchLimits(step_tokens_max=256, requests_max=16),
        queue_requests_max=1_000,
        output_tokens_max=512,
    )
    trace = Trace(format="made", timing="absolute", requests=tuple(requests))
    records = play_cell(CellJob(spec=spec, trace=trace, policy=policy, seed=0, slo=None, faults=faults))
    assert {record.outcome for record in records} == {"finished"}
    return largest_gap(records, *sizes)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fleet=st.sampled_from(FLEETS),
    one=st.tuples(st.integers(1, 64), st.integers(2, 64)),
    other=st.tuples(st.integers(100, 256), st.integers(64, 256)),
)
def test_the_gap_of_two_backlogged_tenants_is_bounded(fleet: Topology, one: Lengths, other: Lengths) -> None:
    """The coordinator counts the service, because a prefill worker sees no output token."""
    assert gap(fleet, VTC, one, other) <= gap_bound(max(one[0], other[0]), MEMORY_TOKENS)


def test_without_counters_the_gap_exceeds_the_bound() -> None:
    """So the load of these tests is one that first come first served divides unfairly."""
    assert gap(FLEETS[1], FCFS, (16, 16), (200, 200)) > gap_bound(200, MEMORY_TOKENS)


@pytest.mark.parametrize("predicted_ratio", [0.0, 1.0])
def test_the_bound_holds_while_roles_change_and_a_worker_dies(predicted_ratio: float) -> None:
    policy = replace(VTC, fairness=Plugin(use="vtc", options={"predicted_ratio": predicted_ratio}))
    flips: list[TimedFault] = [
        Flip(worker=WorkerId(name), at_s=count * 1.5, role=roles[count % 2])
        for count in range(1, 12)
        for name, roles in (("prefill-1", ("prefill", "decode")), ("decode-1", ("decode", "prefill")))
    ]
    deaths = [Kill(worker=WorkerId("decode-0"), at_s=4.0, death=Death(restart_s=1.0))]
    found = gap(Topology(prefill=2, decode=2), policy, (16, 32), (200, 120), (*flips, *deaths))
    assert found <= gap_bound(200, MEMORY_TOKENS)


def test_a_tenant_with_twice_the_weight_gets_twice_the_service() -> None:
    """Half of its service counts, so the bound holds for the weighted service; the plain gap grows beyond it."""
    policy = replace(VTC, fairness=Plugin(use="vtc", options={"weights": {"one": 4.0}}))
    same = (64, 64)
    assert gap(FLEETS[1], policy, same, same) > 2 * gap(FLEETS[1], VTC, same, same)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_client_with_few_requests_does_not_wait_for_one_with_many(is_named: bool) -> None:
    """As on a server, where a client is a key or an address. In a trace it has a number of its own, or its tenant's."""
    flood = [
        TraceRequest(at_s=0.01 * place, input_tokens=64, output_tokens=64, tenant="many", client=int(is_named))
        for place in range(40)
    ]
    tenant = "many" if is_named else "few"
    few = [TraceRequest(at_s=2.0 + place, input_tokens=64, output_tokens=64, tenant=tenant) for place in range(3)]
    spec = ClusterSpec(topology=FLEETS[1], batch=BatchLimits(requests_max=4), queue_s=600.0)
    trace = Trace(format="made", timing="absolute", requests=(*flood, *few))
    records = play_cell(CellJob(spec=spec, trace=trace, policy=FCFS, seed=0, slo=None))
    waits_s = [record.ttft_s or 0.0 for record in records if record.arrival_s >= 2.0]
    assert len(waits_s) == 3
    assert max(waits_s) < 1.0
