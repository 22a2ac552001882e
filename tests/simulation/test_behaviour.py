"""What the deciding half does in whole clusters, one situation a test."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.config import BatchLimits, Topology
from baton.core.messages import PreemptRequest, ToWorker
from baton.core.types import RequestId, Sampling, WorkerId
from baton.decide.control.cluster_messages import PoolDecision
from baton.lab.sim.faults import Death, Flip, Hang, Kill
from baton.lab.sim.journal import Life
from baton.lab.sim.spec import HOST, ClusterSpec, SimCost, SimKV, SimLink
from tests.campaign.play import play
from tests.campaign.scenario import PlannedRequest, Scenario
from tests.campaign.triggers import Cancel, KillAtStep

COST = SimCost(step_overhead_s=0.01, prefill_token_s=0.001, decode_request_s=0.001)
LINK = SimLink(delay_min_s=0.0005, delay_max_s=0.001)


def request(name: str, *, tokens: int = 12, output: int = 8, at_s: float = 0.0, follows: str | None = None):
    """A request of its own tokens; never ends early, since nothing stops it."""
    first = 3 + 20 * (ord(name[-1]) % 10)
    return PlannedRequest(
        id=RequestId(name),
        at_s=at_s,
        prompt=tuple(first + index % 20 for index in range(tokens)),
        output_tokens_max=output,
        sampling=Sampling(temperature=0.0),
        follows=RequestId(follows) if follows is not None else None,
    )


def scenario(*requests: PlannedRequest, topology=(1, 1, 0), blocks: int = 64, faults=()) -> Scenario:
    prefill, decode, mixed = topology
    cluster = ClusterSpec(
        topology=Topology(prefill=prefill, decode=decode, mixed=mixed),
        kv=SimKV(blocks=blocks, block_tokens=4),
        batch=BatchLimits(step_tokens_max=64, requests_max=8, growth_tokens=4),
        cost=COST,
        link=LINK,
    )
    return Scenario(seed=1, cluster=cluster, requests=tuple(requests), faults=tuple(faults))


def lives_of(played: Scenario) -> dict[str, Life]:
    return {str(name): life for name, life in play(played).server.journal.lives.items()}


def outcome(life: Life) -> str:
    return life.closes[0][1].outcome


def test_turn_two_reuses_what_decode_wrote_in_turn_one() -> None:
    """12 prompt tokens and 8 of the answer: 19 are computed, so 4 blocks are sealed, of which decode sealed one."""
    lives = lives_of(scenario(request("a"), request("b", tokens=3, at_s=0.1, follows="a")))
    assert lives["b"].request.prompt_tokens == 12 + 8 + 3
    assert lives["b"].cached_tokens == 16


def test_a_handoff_computes_nothing_twice() -> None:
    """Decode goes on where prefill stopped: it asks for no block of the prompt again."""
    life = lives_of(scenario(request("a")))["a"]
    assert len(life.handoffs_s) == 1
    assert life.handoffs_s[0] == life.token_times_s[0]


def test_a_mixed_worker_hands_nothing_off() -> None:
    life = lives_of(scenario(request("a"), topology=(0, 0, 1)))["a"]
    assert life.handoffs_s == ()
    assert len(life.output) == 8


def test_the_death_of_decode_costs_an_attempt_and_no_token() -> None:
    death = KillAtStep(worker=WorkerId("decode-0"), step=4, moment="during", death=Death(restart_s=5.0))
    life = lives_of(scenario(request("a"), faults=[death]))["a"]
    assert outcome(life) == "finished"
    assert life.attempt == 2
    assert life.token_times_s[-1] < 5.0, "the prefill worker went on, nobody waited for the restart"


def test_a_request_whose_workers_keep_dying_fails_after_its_attempts() -> None:
    kills = [Kill(worker=WorkerId("mixed-0"), at_s=0.005 + 0.01 * n, death=Death()) for n in range(5)]
    life = lives_of(scenario(request("a"), topology=(0, 0, 1), faults=kills))["a"]
    assert outcome(life) == "failed"
    assert life.attempt == 3
    assert "3 times" in life.closes[0][1].reason


def test_with_no_worker_alive_requests_wait_for_one() -> None:
    kills = [Kill(worker=WorkerId("mixed-0"), at_s=0.005, death=Death(restart_s=2.0))]
    life = lives_of(scenario(request("a", at_s=0.5), topology=(0, 0, 1), faults=kills))["a"]
    assert outcome(life) == "finished"
    assert life.token_times_s[0] > 2.0


def test_with_no_worker_for_too_long_requests_are_turned_away() -> None:
    """One has some of its tokens, one none; who comes when the worker is soon back is served."""
    kills = [Kill(worker=WorkerId("mixed-0"), at_s=0.05, death=Death(restart_s=2.0))]
    requests = (request("a"), request("b", at_s=0.5), request("c", at_s=1.5))
    made = scenario(*requests, topology=(0, 0, 1), faults=kills)
    lives = lives_of(replace(made, cluster=replace(made.cluster, wait_s=1.0)))
    assert {name: outcome(life) for name, life in lives.items()} == {
        "a": "rejected",
        "b": "rejected",
        "c": "finished",
    }
    assert 0 < len(lives["a"].output) < 8
    assert [lives[name].closes[0][1].reject for name in "ab"] == ["no_worker", "no_worker"]
    assert [lives[name].closes[0][0] for name in "ab"] == pytest.approx([1.05, 1.5])


def test_a_hung_worker_is_killed_and_its_requests_go_on() -> None:
    hang = Hang(worker=WorkerId("decode-0"), at_s=0.04, silent_s=1.0, death=Death(restart_s=9.0))
    life = lives_of(scenario(request("a"), faults=[hang]))["a"]
    assert outcome(life) == "finished"
    assert life.attempt == 2


def test_last_words_that_come_after_the_successor_started_change_nothing() -> None:
    """The dead worker's report holds the last token and the end; the restarted worker has its name and its request."""
    death = Death(reports="late", restart_s=0.0, late_s=0.005)
    kill = KillAtStep(worker=WorkerId("mixed-0"), step=8, moment="after", death=death)
    life = lives_of(scenario(request("a"), topology=(0, 0, 1), faults=[kill]))["a"]
    assert outcome(life) == "finished"
    assert life.attempt == 2
    assert len(life.output) == 8


def test_a_role_flip_is_obeyed_by_the_next_handoff() -> None:
    """With its only decode worker flipped away, a request stays where it can be served."""
    flip = Flip(worker=WorkerId("decode-0"), at_s=0.0, role="prefill")
    life = lives_of(scenario(request("a", at_s=0.1), faults=[flip]))["a"]
    assert outcome(life) == "finished"


def test_a_short_pool_preempts_the_youngest_and_everybody_finishes() -> None:
    """Three requests of 3 to 12 blocks on 13 blocks; their first blocks fit, their last do not."""
    requests = [request(name, output=34, at_s=0.001 * index) for index, name in enumerate("abc")]
    cluster = play(scenario(*requests, topology=(0, 0, 1), blocks=13))
    lives = cluster.server.journal.lives
    assert [outcome(life) for life in lives.values()] == ["finished"] * 3
    ends = [life.closes[0][0] for life in lives.values()]
    assert ends == sorted(ends), "the oldest always gets on"
    pool = [entry for entry in cluster.server.journal.log if isinstance(entry, PoolDecision)]
    told = [command.command for entry in pool for command in entry.commands if isinstance(command, ToWorker)]
    preempted = {str(command.request_id) for command in told if isinstance(command, PreemptRequest)}
    assert preempted
    assert "a" not in preempted


def test_a_client_that_hangs_up_while_decoding_frees_its_blocks() -> None:
    cancel = Cancel(request_id=RequestId("a"), stage="decoding", delay_s=0.0)
    cluster = play(scenario(request("a", output=100), faults=[cancel]))
    assert outcome(cluster.server.journal.lives[RequestId("a")]) == "cancelled"
    assert cluster.server.pools[HOST].view().blocks_used == 0
