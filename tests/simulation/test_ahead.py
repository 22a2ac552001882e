"""KV that is sent ahead: while a prompt is computed, and before a request moves. One situation a test."""

from __future__ import annotations

import pytest
from msgspec.structs import asdict, replace

from baton.core.config import Plugin
from baton.core.copies import LandingEnded, LandingGranted, LandingRefused, LandingWanted
from baton.core.messages import AheadEnded, HostLost, RequestDropped, SendAhead
from baton.core.types import HostId, RequestId, WorkerId
from baton.decide.control.cluster_messages import PoolDecision
from baton.decide.policy.policy_sets import POLICY_SETS
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, HostKill, WireCut
from baton.lab.sim.spec import SimKind, SimKV
from tests.campaign.play import play
from tests.campaign.restless import UNPINNED
from tests.campaign.scenario import RESTLESS
from tests.campaign.triggers import KillAtStep
from tests.simulation.test_behaviour import outcome, request
from tests.simulation.test_hosts import A, B, two_hosts

LONG = request("r", tokens=600)


def pool_decisions(cluster: SimCluster, host: HostId) -> list[PoolDecision]:
    return [entry for entry in cluster.server.journal.log if isinstance(entry, PoolDecision) and entry.host == host]


def landed_tokens(cluster: SimCluster, host: HostId) -> list[int]:
    return [
        entry.event.computed_tokens for entry in pool_decisions(cluster, host) if isinstance(entry.event, LandingEnded)
    ]


def played(*, policy: str = "baton", blocks: int = 400, **changes: object) -> SimCluster:
    """A prompt of 600 tokens in chunks of 64, from host a to host b."""
    made = two_hosts(LONG, policy=policy)
    cluster = replace(made.cluster, kv=replace(made.cluster.kv, blocks=blocks))
    return play(replace(made, cluster=cluster, **changes))


def test_a_long_prompt_goes_over_while_it_is_computed() -> None:
    """Each landing reaches further; when the prompt is done, only what was computed last is missing."""
    cluster = played()
    landed = landed_tokens(cluster, B)
    assert landed == sorted(landed)
    assert landed[-1] == 600
    assert len(landed) >= 4
    assert 600 - landed[-2] <= 128 + 64
    assert cluster.wires.tokens == 600, "nothing is copied twice"


def test_policies_of_papers_that_do_not_stream_send_it_when_it_is_done() -> None:
    assert landed_tokens(played(policy="distserve"), B) == [600]


def test_a_decode_host_that_is_chosen_at_the_start_gets_the_kv_when_the_prompt_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paired = replace(POLICY_SETS["distserve"], streaming=Plugin(use="place-at-start"))
    monkeypatch.setitem(POLICY_SETS, "paired", paired)
    cluster = played(policy="paired")
    chosen = [c for entry in cluster.server.journal.log for c in getattr(entry, "commands", ())]
    assert [c.worker for c in chosen if isinstance(c, SendAhead)] == [WorkerId("decode-0")]
    assert landed_tokens(cluster, B) == [600]
    assert cluster.wires.tokens == 600


def test_the_second_token_comes_sooner() -> None:
    """The wire is at work while the prompt is computed: what the client waits for is the end of it."""
    waits = {}
    for policy in ("mooncake", "cache-aware-global"):  # they differ in streaming, and in what they refuse
        times_s = played(policy=policy).server.journal.lives[RequestId("r")].token_times_s
        waits[policy] = times_s[1] - times_s[0]
    assert waits["mooncake"] < waits["cache-aware-global"] / 2


def test_the_last_block_of_a_prompt_is_not_sent_ahead() -> None:
    """Whoever had to compute the prompt again in what has landed writes its last token, and others read that block."""
    made = two_hosts(request("r", tokens=640), policy="baton")
    cluster = play(replace(made, cluster=replace(made.cluster, kv=replace(made.cluster.kv, blocks=400))))
    wanted = [entry.event for entry in pool_decisions(cluster, B) if isinstance(entry.event, LandingWanted)]
    assert max(event.blocks for event in wanted if event.worker is None) <= 159
    assert max(event.blocks for event in wanted) == 160


def test_a_full_host_refuses_and_loses_nothing() -> None:
    """Nobody's blocks are taken for what is sent ahead; the KV comes over when there is room."""
    made = two_hosts(request("q", tokens=500, output=60), replace(LONG, at_s=0.6), policy="baton")
    cluster = play(replace(made, cluster=replace(made.cluster, kv=replace(made.cluster.kv, blocks=160))))
    refused = [c for entry in pool_decisions(cluster, B) for c in entry.commands if isinstance(c, LandingRefused)]
    assert refused
    assert {outcome(life) for life in cluster.server.journal.lives.values()} == {"finished"}


def test_a_wire_that_breaks_under_what_is_sent_ahead_costs_no_token() -> None:
    cut = WireCut(one=A, other=B, at_s=0.3, for_s=0.2)
    cluster = played(faults=(cut,))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"
    assert landed_tokens(cluster, B)[-1] == 600


def test_a_target_that_dies_while_it_is_sent_to_is_forgotten() -> None:
    cluster = played(faults=(HostKill(host=B, at_s=0.3, notice_s=0.01, restart_s=0.2),))
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_source_that_dies_leaves_what_it_has_sent() -> None:
    """The prompt is computed again where part of it has landed: that part is a prefix hit."""
    death = KillAtStep(worker=WorkerId("prefill-0"), step=8, moment="during", death=Death(restart_s=9.0))
    cluster = played(faults=(death, HostKill(host=A, at_s=0.66, notice_s=0.0, restart_s=9.0)))
    life = cluster.server.journal.lives[RequestId("r")]
    assert outcome(life) == "finished"
    decode = cluster.worker(WorkerId("decode-0"))
    assert decode is not None
    assert decode.steps < 10 + 8, "ten steps for the whole prompt, and eight tokens"


def test_a_move_stops_the_request_for_the_end_of_its_kv_alone() -> None:
    """Blocks that are sealed go over while it decodes; then it stops, and at most two blocks and the tail follow."""
    made = two_hosts(request("q", output=60), request("r", tokens=40, output=60), policy=RESTLESS)
    cluster = play(replace(made, cluster=replace(made.cluster, tick_s=0.05)))
    entries = cluster.server.journal.log
    reports = [d for d in cluster.server.journal.decisions() if isinstance(d.event, AheadEnded) and d.event.landed]
    assert reports
    moved = [
        index
        for index, entry in enumerate(entries)
        if isinstance(entry, PoolDecision) and isinstance(entry.event, RequestDropped) and not entry.event.preempted
    ]
    missing = []
    for index in moved:
        grants = [c for e in entries[index : index + 4] for c in e.commands if isinstance(c, LandingGranted)]
        missing += [len(grant.block_table) - grant.cached_blocks for grant in grants]
    assert missing
    assert max(missing) <= 3


def test_a_move_whose_kv_does_not_get_there_is_called_off() -> None:
    made = two_hosts(request("r", tokens=40, output=60), policy=RESTLESS)
    cut = WireCut(one=A, other=B, at_s=0.0, for_s=99.0)
    cluster = play(replace(made, cluster=replace(made.cluster, tick_s=0.05), faults=(cut,)))
    failed = [d for d in cluster.server.journal.decisions() if isinstance(d.event, AheadEnded) and not d.event.landed]
    assert failed
    assert not [command for decision in failed for command in decision.commands]
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_a_move_to_a_host_that_dies_is_called_off_and_may_be_made_again() -> None:
    """The request runs on elsewhere, and counted as one that is about to move until its end."""
    made = two_hosts(request("r", tokens=40, output=60), policy=RESTLESS)
    kill = HostKill(host=B, at_s=0.203, notice_s=0.001, restart_s=0.05)
    cluster = play(replace(made, cluster=replace(made.cluster, tick_s=0.05), faults=(kill,)))
    decisions = cluster.server.journal.decisions()
    (lost,) = [index for index, made in enumerate(decisions) if isinstance(made.event, HostLost)]
    called_off = decisions[lost + 1].event
    assert isinstance(called_off, AheadEnded)
    assert not called_off.landed
    assert any(isinstance(command, SendAhead) for made in decisions[lost:] for command in made.commands)
    assert outcome(cluster.server.journal.lives[RequestId("r")]) == "finished"


def test_hosts_of_two_block_sizes_share_prefixes_and_hand_off() -> None:
    """Host b's blocks are twice as large: it knows every other hash of a prompt, and lands tokens, not blocks."""
    turns = (request("q", tokens=33, output=10), request("r", tokens=9, at_s=2.0, follows="q"))
    made = two_hosts(*turns, policy="baton" + UNPINNED)
    spec = made.cluster
    kinds = {"large": SimKind(cost={"model": "linear", **asdict(spec.cost)}, kv=SimKV(blocks=32, block_tokens=8))}
    workers = (spec.workers[0], replace(spec.workers[1], kind="large"))
    cluster = play(replace(made, cluster=replace(spec, kinds=kinds, workers=workers)))
    assert landed_tokens(cluster, B) == [33, 33 + 10 + 9]
    wanted = [entry.event for entry in pool_decisions(cluster, B) if isinstance(entry.event, LandingWanted)]
    assert [event.blocks for event in wanted] == [5, 7]
    assert cluster.wires.tokens == 33 + 52 - 40, "of turn two's 52 tokens, five blocks of eight were there"
    assert cluster.server.journal.lives[RequestId("r")].cached_tokens == 32, (
        "prefill's host holds the prompt of turn one"
    )
