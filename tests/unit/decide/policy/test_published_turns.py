"""Published policies for later turns and for prompts of unlike length, on views whose answer was computed by hand."""

from __future__ import annotations

from baton.core.config import BatchLimits
from baton.core.types import HostId, Slo
from baton.decide.policy.routing import Route
from baton.lab.policies.conversations import AmpdRouting, ConServe
from baton.lab.policies.pla import PlaBatching, PlaRouting
from tests.unit.decide.policy.test_batching import Part
from tests.unit.decide.policy.views import COST, cluster, request, worker


def test_conserve_runs_later_turns_where_the_conversation_decodes() -> None:
    """Half of the prompt beside a decode worker makes a later turn; a prefix beside prefill workers makes none."""
    short, long = worker("p1", host="hp"), worker("p2", queued_tokens=900, host="hp")
    near, far = worker("d1", "decode", host="h1", context_tokens=900), worker("d2", "decode", host="h2")
    view = cluster(long, short, near, far, hits={"h1": 500, "hp": 900})
    assert ConServe().route(request(), [long, short], view, COST) == Route(worker=near.id, until="end")
    first = cluster(long, short, near, far, hits={"h1": 499, "hp": 900})
    assert ConServe().route(request(), [long, short], first, COST) == "p1"
    assert ConServe().place(request(), None, [near, far], view, COST) == "d2", "the least KV in use"


def test_ampd_computes_a_later_turn_locally_while_both_slos_hold() -> None:
    """100 new tokens take 0.11 s. In a step with two decodes: 0.01 + 0.002 + 0.1 = 0.112 s."""
    prefill, decode = worker("p", host="hp"), worker("d", "decode", host="hd", running_requests=2)
    view = cluster(prefill, decode, hits={"hd": 900})
    route = AmpdRouting().route
    local, remote = Route(worker=decode.id, until="end"), Route(worker=prefill.id, fetch=HostId("hd"))
    assert route(request(slo=Slo(ttft_s=0.2, tpot_s=0.12)), [prefill], view, COST) == local
    assert route(request(slo=Slo(ttft_s=0.2, tpot_s=0.11)), [prefill], view, COST) == remote
    assert route(request(slo=Slo(ttft_s=0.1, tpot_s=0.12)), [prefill], view, COST) == remote
    assert route(request(slo=Slo(ttft_s=2.0, tpot_s=1.0)), [prefill], cluster(prefill, decode), COST) == "p"


def test_pla_gives_short_prompts_workers_of_their_own() -> None:
    """After as many tokens of short prompts as of long ones, one of two workers serves each class."""
    busy = [worker("a", queued_tokens=50), worker("b", queued_tokens=9)]
    policy = PlaRouting(short_tokens_max=256)
    view = cluster(*busy)
    assert policy.route(request(prompt_tokens=1000), busy, view, COST) == "b"
    chosen = [policy.route(request(prompt_tokens=100), busy, view, COST) for _ in range(5)]
    assert chosen == ["a"] * 5, "the shorter queue is that of long prompts"
    assert policy.route(request(prompt_tokens=1000), busy, view, COST) == "b"
    idle = [worker("a", queued_tokens=50), worker("b")]
    assert policy.route(request(prompt_tokens=100), idle, cluster(*idle), COST) == "b", "an idle worker takes either"
    warm = cluster(*busy, hits={"h": 900})
    assert policy.route(request(prompt_tokens=1000), busy, warm, COST) == "a", "100 tokens are new"


def test_pla_batches_short_prompts_first_and_long_ones_after_some_steps() -> None:
    long, short, decode = Part(500), Part(20), Part(1, computed_tokens=50, started=True)
    policy, limits = PlaBatching(short_tokens_max=256, short_steps_max=2), BatchLimits(step_tokens_max=100)
    steps = [policy.select([long, short, decode], limits, COST) for _ in range(4)]
    assert steps == [[(2, 1), (1, 20)], [(2, 1), (1, 20)], [(2, 1), (0, 99)], [(2, 1), (1, 20)]]
    assert policy.select([long, decode], limits, COST) == [(1, 1), (0, 99)]
    no_room = Part(20, room_tokens=0)
    assert policy.select([long, no_room], limits, COST) == [(0, 100)], "the other class, where this one has no blocks"
