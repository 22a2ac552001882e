"""Second copies of running decodes: how much KV the loss of a host costs, and where the copies are read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import asdict, replace

from baton.core.class_config import ClassConfig
from baton.core.config import PolicyConfig
from baton.core.copies import LandingEnded
from baton.core.messages import BlocksGranted, ToWorker
from baton.core.types import HostId, RequestId
from baton.decide.control.cluster_messages import BeginRequest, PoolDecision
from baton.decide.control.decision_log import Decision
from baton.lab.sim.cells import CellJob
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import HostKill, HostLeave, WireCut
from baton.lab.sim.replay_trace import play_cell
from baton.lab.sim.spec import ClusterSpec, SimCost, SimKind, SimKV, SimTier, SimWorkers
from baton.lab.workload.request import Trace, TraceRequest
from tests.campaign.play import play
from tests.campaign.scenario import Scenario
from tests.campaign.triggers import Fault
from tests.simulation.test_behaviour import outcome, request, scenario

A, B, C = HostId("a"), HostId("b"), HostId("c")
COPY_TOKENS, BLOCK_TOKENS = 8, 4
LOST = HostKill(host=A, at_s=1.0, notice_s=0.0, restart_s=9.0)
POOL = SimTier(name="pool", blocks=100, latency_s=0.0001, bytes_per_s=1e6, token_bytes=1, shared=True)
LARGE = "large"


def decode(
    *faults: Fault, hosts: Sequence[str] = (A, B), copy_tokens: int = COPY_TOKENS, tiers: Sequence[SimTier] = ()
) -> Scenario:
    """Return one decode of 22 + 100 tokens on host a, while the other hosts are idle. C has the largest arena."""
    asked = replace(request("r", tokens=22, output=100), copy_tokens=copy_tokens)
    made = scenario(asked, faults=(LOST, *faults))
    workers = tuple(SimWorkers(role="mixed", host=host, kind=LARGE if host == C else "") for host in hosts)
    large = SimKind(cost={"model": "linear", **asdict(made.cluster.cost)}, kv=SimKV(blocks=128, block_tokens=4))
    kinds = {LARGE: large} if C in hosts else {}
    return replace(made, cluster=replace(made.cluster, workers=workers, tiers=tuple(tiers), kinds=kinds))


def lost_tokens(cluster: SimCluster) -> tuple[int, int]:
    """Return the tokens that the request had when its host was lost, and how many of them were recomputed."""
    life = cluster.server.journal.lives[RequestId("r")]
    assert outcome(life) == "finished"
    assert life.attempt == 2
    known = 22 + sum(at_s < LOST.at_s for at_s in life.token_times_s)
    return known, known - read_tokens(cluster.server.journal.turns)


def landed_on(cluster: SimCluster) -> set[HostId]:
    """Return the hosts that the KV of the request was copied to."""
    told = [entry for entry in cluster.server.journal.log if isinstance(entry, PoolDecision)]
    ends = [(entry.host, entry.event) for entry in told if isinstance(entry.event, LandingEnded)]
    return {host for host, end in ends if end.request_id == "r"}


def read_tokens(decisions: Sequence[Decision]) -> int:
    """Return the tokens whose KV the second attempt had at its begin."""
    for decision in decisions:
        for command in decision.commands:
            if isinstance(command, BeginRequest) and command.attempt == 2 and command.block_table:
                return command.computed_tokens
            if isinstance(command, ToWorker) and isinstance(command.command, BlocksGranted):
                granted = command.command
                if granted.attempt == 2:
                    return granted.cached_blocks * BLOCK_TOKENS
    raise AssertionError("there is no second attempt")


def test_without_copies_everything_is_recomputed() -> None:
    known, recomputed = lost_tokens(play(decode(copy_tokens=0)))
    assert recomputed == known > 100


@pytest.mark.parametrize(
    ("hosts", "tiers"),
    [
        pytest.param((A, B), (), id="the copy is where it continues"),
        pytest.param((A, B, C), (), id="the copy comes from a third host"),
        pytest.param((A, B), (POOL,), id="a tier of both hosts has the copy"),
    ],
)
def test_a_decode_recomputes_at_most_the_tokens_since_its_last_copy(
    hosts: tuple[HostId, ...], tiers: tuple[SimTier, ...]
) -> None:
    """A copy waits for full blocks and for the one before it, and the last token has no KV yet."""
    cluster = play(decode(hosts=hosts, tiers=tiers))
    known, recomputed = lost_tokens(cluster)
    assert known > 100
    assert recomputed <= COPY_TOKENS + 2 * BLOCK_TOKENS
    assert landed_on(cluster) == {*hosts} - {A}
    assert (cluster.wires.copies == 0) == bool(tiers), "blocks in a tier of both hosts need no copy between them"


def test_a_copy_that_failed_is_made_again_with_the_next_one() -> None:
    cut = WireCut(one=A, other=B, at_s=0.2, for_s=0.3)
    known, recomputed = lost_tokens(play(decode(cut)))
    assert known > 100
    assert recomputed <= COPY_TOKENS + 2 * BLOCK_TOKENS


def test_the_loss_of_the_second_host_moves_the_copy_to_a_third() -> None:
    """Host c has the copies first, as its arena is the largest."""
    gone = HostKill(host=C, at_s=0.5, notice_s=0.0, restart_s=9.0)
    known, recomputed = lost_tokens(play(decode(gone, hosts=(A, B, C))))
    assert known > 100
    assert recomputed <= COPY_TOKENS + 2 * BLOCK_TOKENS


def test_a_leaving_host_gets_no_copies() -> None:
    leaves = HostLeave(host=C, at_s=0.0, drain_s=5.0)
    cluster = play(decode(leaves, hosts=(A, B, C)))
    assert landed_on(cluster) == {B}
    known, recomputed = lost_tokens(cluster)
    assert recomputed <= COPY_TOKENS + 2 * BLOCK_TOKENS < known


def test_the_class_of_a_request_sets_the_copies_in_a_replayed_trace() -> None:
    """The same fleet and trace, with the setting of its class in a cluster file."""
    copied = ClassConfig(name="copied", copy_tokens=COPY_TOKENS)
    spec = ClusterSpec(
        workers=tuple(SimWorkers(role="mixed", host=host) for host in (A, B)),
        kv=SimKV(blocks=64, block_tokens=BLOCK_TOKENS),
        cost=SimCost(step_overhead_s=0.01, prefill_token_s=0.001, decode_request_s=0.001, handoff_token_s=0.0001),
        classes=(copied,),
        default_class="copied",
    )
    asked = TraceRequest(at_s=0, input_tokens=22, output_tokens=100)
    trace = Trace(format="made", timing="absolute", requests=(asked,))
    decisions: list[Decision] = []
    job = CellJob(spec=spec, trace=trace, policy=PolicyConfig(), seed=0, slo=None, faults=(LOST,))
    (record,) = play_cell(job, decisions.append)
    assert record.outcome == "finished"
    assert read_tokens(decisions) >= 22 + 60
