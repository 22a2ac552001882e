"""Handoffs by a pool that two hosts share, one situation a test. INV-8 is checked at the end of each, byte for byte."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.copies import LandingEnded
from baton.core.handoff_paths import HandoffPath, HandoffView, PathChosen
from baton.core.messages import SendAhead
from baton.core.ports import CostModel
from baton.core.tier_messages import LoadEnded, LoadWanted, PutEnded, PutWanted
from baton.core.types import HostId, Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import PoolDecision
from baton.decide.kv.window import Window
from baton.lab.sim.cluster import SimCluster
from baton.lab.sim.faults import Death, HostKill, Kill, StoreFault, WireCut
from baton.lab.sim.spec import SimTier
from tests.campaign import restless
from tests.campaign.play import play
from tests.campaign.scenario import RESTLESS, PlannedRequest, Scenario
from tests.campaign.triggers import Cancel, Fault
from tests.simulation.test_behaviour import outcome, request
from tests.simulation.test_hosts import A, B, two_hosts

POOL = SimTier(name="pool", blocks=1000, latency_s=0.001, bytes_per_s=1e6, token_bytes=100, shared=True)
"""A block of four tokens takes 0.4 ms."""
R, LONG = RequestId("r"), request("r", tokens=42)
"""Ten blocks and half of one. The first token comes at 0.06 s or so."""
SIX = [request(f"r{place}", tokens=60, at_s=place * 0.3) for place in range(6)]
STREAMED = request("r", tokens=600)
"""150 blocks. A step computes 16 of them, and a run that is worth a copy of its own has 32."""


def by_pool(
    *requests: PlannedRequest,
    tier: SimTier = POOL,
    faults: tuple[Fault, ...] = (),
    policy: str = "central",
    blocks: int = 400,
) -> Scenario:
    made = two_hosts(*(requests or (LONG,)), faults=faults, policy=policy)
    kv = replace(made.cluster.kv, blocks=blocks)
    return replace(made, cluster=replace(made.cluster, tiers=(tier,), kv=kv))


def events(cluster: SimCluster, host: HostId) -> list[object]:
    log = cluster.server.journal.log
    return [entry.event for entry in log if isinstance(entry, PoolDecision) and entry.host == host]


def decode_steps(cluster: SimCluster, worker: str = "decode-0") -> int:
    found = cluster.worker(WorkerId(worker))
    assert found is not None
    return found.steps


def finished(cluster: SimCluster, name: RequestId = R) -> bool:
    return outcome(cluster.server.journal.lives[name]) == "finished"


def handed_off_s(cluster: SimCluster) -> float:
    return cluster.server.journal.lives[R].handoffs_s[0]


def put_ends(cluster: SimCluster) -> list[float]:
    log = cluster.server.journal.log
    decisions = [entry for entry in log if isinstance(entry, PoolDecision)]
    return [entry.now_s for entry in decisions for command in entry.commands if isinstance(command, PutEnded)]


def put_s() -> float:
    """When the blocks of the one request are in the pool."""
    (ended_s,) = put_ends(play(by_pool()))
    return ended_s


def test_neither_host_talks_to_the_other() -> None:
    """Ten blocks go by the pool; the two tokens behind them are computed again, in the step that decodes anyway."""
    cluster = play(by_pool())
    assert finished(cluster)
    assert cluster.wires.copies == 0
    assert [event.computed_tokens for event in events(cluster, B) if isinstance(event, LandingEnded)] == [40]
    assert decode_steps(cluster) == 7


def test_what_the_target_holds_is_not_put() -> None:
    """Turn two of a chat: decode's host has all of turn one, and the pool is given only what is behind it."""
    turns = (replace(LONG, id=RequestId("q")), request("r", tokens=30, at_s=0.5, follows="q"))
    cluster = play(by_pool(*turns, policy="central" + restless.UNPINNED))
    assert finished(cluster)
    puts = [event for event in events(cluster, A) if isinstance(event, PutWanted) and event.request_id == R]
    prompt_blocks = (42 + 8 + 30) // 4
    held_blocks = (42 + 8 - 1) // 4
    assert [len(put.hashes) for put in puts if put.number is not None] == [prompt_blocks - held_blocks]


def test_the_direct_way_leaves_the_pool_alone() -> None:
    cluster = play(by_pool(policy="direct"))
    assert cluster.wires.tokens == 42
    assert not [event for event in events(cluster, A) if isinstance(event, PutWanted)]


def test_a_source_that_dies_behind_its_put_is_not_missed() -> None:
    """What central buys: decode goes on from the pool, and computes no more than it would have."""
    kill = HostKill(host=A, at_s=put_s() + 0.0005, notice_s=0.0, restart_s=9.0)
    cluster = play(by_pool(faults=(kill,)))
    life = cluster.server.journal.lives[R]
    assert (outcome(life), life.attempt) == ("finished", 1)
    assert [event.computed_tokens for event in events(cluster, B) if isinstance(event, LandingEnded)] == [40]
    assert decode_steps(cluster) == 7
    lost = play(by_pool(policy="direct", faults=(kill,)))
    landed = [event.computed_tokens for event in events(lost, B) if isinstance(event, LandingEnded)]
    assert landed == [0], "directly it would all be computed again"


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_source_that_dies_while_it_puts_leaves_no_wrong_token(share: float) -> None:
    begun_s = handed_off_s(play(by_pool()))
    kill = HostKill(host=A, at_s=begun_s + share * (put_s() - begun_s), notice_s=0.001, restart_s=0.5)
    assert finished(play(by_pool(faults=(kill,))))


@pytest.mark.parametrize("wait_s", [0.002, 0.006, 0.009])
def test_a_target_that_dies_is_replaced_from_the_pool_or_the_source(wait_s: float) -> None:
    """While the source puts, while the target takes, and after that."""
    at_s = handed_off_s(play(by_pool())) + wait_s
    for fault in (
        HostKill(host=B, at_s=at_s, notice_s=0.001, restart_s=0.5),
        Kill(worker=WorkerId("decode-0"), at_s=at_s, death=Death(restart_s=0.5)),
    ):
        cluster = play(by_pool(faults=(fault,)))
        assert finished(cluster)
        assert cluster.server.journal.lives[R].attempt == 2


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.008])
def test_a_client_that_hangs_up_frees_both_hosts(delay_s: float) -> None:
    """INV-2 is checked at the end: no block, no put and no request is left."""
    cluster = play(by_pool(faults=(Cancel(request_id=R, stage="handed_off", delay_s=delay_s),)))
    assert outcome(cluster.server.journal.lives[R]) == "cancelled"
    assert all(pool.view().blocks_used == 0 for pool in cluster.server.pools.values())


@pytest.mark.parametrize("what", ["full", "down"])
def test_a_pool_that_takes_nothing_is_gone_round(what: str) -> None:
    """The put fails, and the KV goes directly: nothing is computed twice."""
    trouble = StoreFault(host=A, tier="pool", what="full" if what == "full" else "down", at_s=0.0, for_s=9.0)
    cluster = play(by_pool(faults=(trouble,)))
    assert finished(cluster)
    assert cluster.wires.tokens == 42


def test_a_pool_that_hangs_is_answered_for() -> None:
    """After the store's limit the KV goes directly. The blocks behind the batch that failed are not tried."""
    slow = replace(POOL, latency_s=2.0, answer_s=0.5)
    cluster = play(by_pool(request("r", tokens=300), tier=slow))
    assert len(put_ends(cluster)) == 1
    assert finished(cluster)
    assert cluster.wires.tokens == 300


def test_a_block_that_is_damaged_in_the_pool_costs_a_recompute() -> None:
    at_s = put_s() + 0.0001
    damage = StoreFault(host=A, tier="pool", what="damaged", at_s=at_s, for_s=0.0)
    cluster = play(by_pool(faults=(damage,)))
    assert finished(cluster)
    assert decode_steps(cluster) <= 8, "what is missing fits into one step"


def test_the_source_is_free_before_the_target_has_room() -> None:
    """Directly, a prompt holds prefill's blocks until decode has room for it; by the pool, until they are put."""
    crowd = (request("q", tokens=30, output=40), request("r", tokens=150, at_s=0.1))

    def released_s(policy: str) -> float:
        cluster = play(by_pool(*crowd, policy=policy, blocks=40))
        assert finished(cluster)
        log = cluster.server.journal.log
        return max(
            entry.now_s
            for entry in log
            if isinstance(entry, PoolDecision) and entry.host == A and type(entry.event).__name__ == "ReleaseBlocks"
        )

    assert released_s("central") < released_s("direct")


def test_a_prompt_is_put_while_it_is_computed() -> None:
    """As it is sealed, in runs: when the last chunk is done, only that is left to put."""
    cluster = play(by_pool(request("r", tokens=600)))
    puts = [event for event in events(cluster, A) if isinstance(event, PutWanted)]
    assert len(puts) >= 4
    assert puts[-1].number is not None
    assert [put.number for put in puts[:-1]] == [None] * (len(puts) - 1)
    assert cluster.wires.copies == 0
    assert finished(cluster)


def test_what_was_put_of_a_prompt_outlives_its_host() -> None:
    """Prefill's host dies in mid-prompt: the next attempt reads what is in the pool, and computes the rest."""
    kill = HostKill(host=A, at_s=0.5, notice_s=0.0, restart_s=9.0)
    cluster = play(by_pool(request("r", tokens=600), faults=(kill,)))
    life = cluster.server.journal.lives[R]
    assert (outcome(life), life.attempt) == ("finished", 2)
    landed = [event.computed_tokens for event in events(cluster, B) if isinstance(event, LandingEnded)]
    assert landed
    assert landed[0] >= 128


def test_of_a_model_that_sees_a_window_nothing_goes_by_the_pool() -> None:
    """A pool is read from the first block on, and the source has let go of that: nobody could take what it puts."""
    made = by_pool(request("r", tokens=30))
    cluster = play(replace(made, cluster=replace(made.cluster, window=Window(tokens=8, step_tokens=4))))
    assert finished(cluster)
    assert not [event for event in events(cluster, A) if isinstance(event, PutWanted)]
    assert (cluster.wires.copies, cluster.wires.tokens) == (1, 10)
    assert decode_steps(cluster) == 7, "nothing is computed again"


def test_a_direct_way_that_fails_is_left_for_the_pool() -> None:
    """The first request finds the wire cut, and is computed again; the second one goes by the pool at once."""
    turns = (request("q", tokens=42), request("r", tokens=41, at_s=0.5))
    cut = WireCut(one=A, other=B, at_s=0.0, for_s=9.0)
    cluster = play(by_pool(*turns, policy="baton", faults=(cut,)))
    assert finished(cluster)
    assert cluster.wires.copies == 0
    assert events(cluster, B).count(LandingEnded(R, 40, cluster.server.journal.lives[R].request.block_hashes)) == 1


def test_the_pool_is_taken_where_it_was_measured_to_be_quicker() -> None:
    """Copying takes 1 ms a token, the pool 0.2 ms there and back: known once the direct way was measured."""
    turns = tuple(request(name, tokens=40 + place, at_s=0.5 * place) for place, name in enumerate("pqrs"))
    cluster = play(by_pool(*turns, policy="baton"))
    assert cluster.wires.copies == 1
    puts = [event.number for event in events(cluster, A) if isinstance(event, PutWanted)]
    assert len(puts) - puts.count(None) == 3
    slow = play(by_pool(*turns, policy="baton", tier=replace(POOL, latency_s=0.05)))
    assert slow.wires.copies == 4


# ---- takes in runs, while the rest is computed and put


def landed(cluster: SimCluster) -> list[tuple[float, int]]:
    """When KV landed at decode's host, and how many leading tokens that made."""
    log = cluster.server.journal.log
    return [
        (entry.now_s, entry.event.computed_tokens)
        for entry in log
        if isinstance(entry, PoolDecision) and entry.host == B and isinstance(entry.event, LandingEnded)
    ]


def taken_blocks(cluster: SimCluster) -> list[int]:
    """How many blocks each read of decode's host has asked the pool for."""
    return [len(event.hashes) for event in events(cluster, B) if isinstance(event, LoadWanted)]


def test_decode_takes_what_is_put_while_the_rest_is_computed() -> None:
    """After the last layer less than two runs are left to take, and no block is read twice."""
    cluster = play(by_pool(STREAMED))
    assert finished(cluster)
    ahead = [tokens for now_s, tokens in landed(cluster) if now_s < handed_off_s(cluster)]
    assert len(ahead) >= 3
    assert ahead == sorted(ahead)
    *_, last = taken_blocks(cluster)
    assert 0 < last < 2 * 32
    assert sum(taken_blocks(cluster)) == 150
    assert landed(cluster)[-1][1] == 600
    assert cluster.wires.copies == 0


def test_a_put_that_is_waited_for_is_taken_in_runs_too() -> None:
    """Nothing is sent ahead of a prompt of 250 tokens: its put is cut in runs, and one is taken before its end."""
    cluster = play(by_pool(request("r", tokens=250)))
    assert finished(cluster)
    assert taken_blocks(cluster) == [32, 30]
    (put_ended_s,) = put_ends(cluster)
    log = cluster.server.journal.log
    asked_s = [entry.now_s for entry in log if isinstance(entry, PoolDecision) and isinstance(entry.event, LoadWanted)]
    assert asked_s[0] < put_ended_s


def test_what_the_pool_holds_already_is_taken_at_once() -> None:
    """Turn one is in the pool and prefill's host has it; decode's host comes back empty, and reads it meanwhile."""
    turns = (request("q", tokens=400), request("r", tokens=300, at_s=4.0, follows="q"))
    kill = HostKill(host=B, at_s=2.0, notice_s=0.0, restart_s=0.5)
    cluster = play(by_pool(*turns, faults=(kill,)))
    assert finished(cluster)
    first_s, tokens = next((now_s, tokens) for now_s, tokens in landed(cluster) if now_s > 4.0)
    assert tokens >= 400
    assert first_s < handed_off_s(cluster)


def test_without_room_to_spare_all_is_taken_when_there_is() -> None:
    """Decode's host is full of another request: what is put ahead stays in the pool until that one is over."""
    crowd = (request("q", tokens=60, output=200), request("r", tokens=300, at_s=0.1))
    cluster = play(by_pool(*crowd, blocks=80))
    assert finished(cluster)
    assert finished(cluster, RequestId("q"))
    assert [tokens for now_s, tokens in landed(cluster) if now_s > handed_off_s(cluster)] == [300]


def test_who_starts_where_it_is_read_waits_for_that() -> None:
    """The read of what the pool has is slow: decode begins when it is over, in blocks that nobody writes any more."""
    turns = (request("q", tokens=400), request("r", tokens=8, at_s=4.0, follows="q"))
    kill = HostKill(host=B, at_s=2.0, notice_s=0.0, restart_s=0.5)
    slow = StoreFault(host=A, tier="pool", what="slow", at_s=3.0, for_s=9.0)
    cluster = play(by_pool(*turns, faults=(kill, slow)))
    assert finished(cluster)
    first_s = next(now_s for now_s, _ in landed(cluster) if now_s > 4.0)
    assert first_s > handed_off_s(cluster)
    assert decode_steps(cluster) <= 8 + 8


def test_a_client_that_hangs_up_while_it_waits_for_a_read_leaves_nothing() -> None:
    turns = (request("q", tokens=400), request("r", tokens=8, at_s=4.0, follows="q"))
    kill = HostKill(host=B, at_s=2.0, notice_s=0.0, restart_s=0.5)
    slow = StoreFault(host=A, tier="pool", what="slow", at_s=3.0, for_s=9.0)
    hangs_up = Cancel(request_id=R, stage="handed_off", delay_s=0.001)
    cluster = play(by_pool(*turns, faults=(kill, slow, hangs_up)))
    assert outcome(cluster.server.journal.lives[R]) == "cancelled"
    assert all(pool.view().blocks_used == 0 for pool in cluster.server.pools.values())


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8, 0.95, 1.0])
def test_whoever_dies_while_it_is_streamed_by_the_pool_leaves_no_wrong_token(share: float) -> None:
    """Either host, the worker that decodes, and the pool: at any time from the first chunk to the last take."""
    at_s = share * landed(play(by_pool(STREAMED)))[-1][0]
    faults: tuple[Fault, ...] = (
        HostKill(host=A, at_s=at_s, notice_s=0.001, restart_s=0.5),
        HostKill(host=B, at_s=at_s, notice_s=0.001, restart_s=0.5),
        Kill(worker=WorkerId("decode-0"), at_s=at_s, death=Death(restart_s=0.5)),
        Kill(worker=WorkerId("prefill-0"), at_s=at_s, death=Death(restart_s=0.5)),
    )
    for fault in faults:
        assert finished(play(by_pool(STREAMED, faults=(fault,))))
    for what in ("full", "down", "slow", "damaged", "lost"):
        trouble = StoreFault(host=A, tier="pool", what=what, at_s=at_s, for_s=0.3)
        assert finished(play(by_pool(STREAMED, faults=(trouble,))))


def test_a_read_ahead_that_finds_damage_is_not_tried_again_until_the_end() -> None:
    """What the pool has damaged is put again where the source has it, and nothing is computed twice."""
    first_s = landed(play(by_pool(STREAMED)))[0][0]
    damage = StoreFault(host=A, tier="pool", what="damaged", at_s=first_s + 0.001, for_s=0.0)
    cluster = play(by_pool(STREAMED, faults=(damage,)))
    assert finished(cluster)
    whole = [all(event.whole) for event in events(cluster, B) if isinstance(event, LoadEnded)]
    assert whole.count(False) <= 2
    assert landed(cluster)[-1][1] == 600


class ForgetsNothing:
    """Sends the longer runs, the more often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        self.asked += 1
        return self.asked

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        return 1


def test_a_policy_that_remembers_what_it_was_asked_decides_the_same_in_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """INV-7 is checked at the end: only events ask it, so whoever is told the same is asked as often."""
    monkeypatch.setattr(restless, "RestlessStreaming", ForgetsNothing)
    cluster = play(by_pool(*SIX, policy=RESTLESS))
    commands = [command for decision in cluster.server.journal.decisions() for command in decision.commands]
    assert len({command.run_tokens for command in commands if isinstance(command, SendAhead)}) > 1
    assert any(isinstance(event, PutWanted) and event.number for event in [*events(cluster, A), *events(cluster, B)])


class RemembersWays(ForgetsNothing):
    """Plays two families, as what a configuration names for both: the more ways it chose, the longer are its runs."""

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        return 1 + self.asked

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        self.asked += 1
        return "central"


def test_a_policy_that_remembers_which_ways_it_chose_decides_the_same_in_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question which way is an event as all others (INV-7)."""
    made: list[RemembersWays] = []
    monkeypatch.setattr(restless, "RestlessStreaming", lambda: made.append(RemembersWays()) or made[-1])
    monkeypatch.setattr(restless, "RestlessHandoff", lambda: made[-1])
    journal = play(by_pool(*SIX, policy=RESTLESS)).server.journal
    commands = [command for decision in journal.turns for command in decision.commands]
    assert any(isinstance(command, PathChosen) for command in commands)
    assert len({command.run_tokens for command in commands if isinstance(command, SendAhead)}) > 1
