"""A server that gets more than it can do serves what it can do in time, and refuses the rest at once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.types import RequestId, Sampling
from baton.decide.control.cluster_messages import WorkerSaid
from baton.decide.control.decision_log import replay
from baton.lab.sim.cluster import SimCluster, fresh_cluster
from baton.lab.sim.journal import Life
from baton.lab.sim.spec import SimCost
from tests.campaign.play import play
from tests.campaign.restless import play_policies
from tests.campaign.scenario import PlannedRequest
from tests.simulation.test_behaviour import LINK, scenario

SECONDS, PER_SECOND = 30, 10
PROMPT_TOKENS = 24
COST = SimCost(step_overhead_s=0.01, prefill_token_s=0.01, decode_request_s=0.001)
TTFT_S = 7.0


SLOW_DECODE = SimCost(step_overhead_s=0.01, prefill_token_s=0.0001, decode_request_s=0.01)
POLICY = "least-load"
"""A set whose roles are static: roles that adapt give the overloaded phase a second worker."""
DECODE_BATCH = 8
"""Requests in a batch of the scenario."""


def overload(
    queue_s: float | None, *, cost: SimCost = COST, output_tokens: int = 4, policy: str = POLICY
) -> SimCluster:
    """10 requests a second for workers that compute about half of them."""
    requests = [
        PlannedRequest(
            id=RequestId(f"r{number}"),
            at_s=number / PER_SECOND,
            prompt=tuple(3 + (number * 7 + index * (1 + number % 5)) % 200 for index in range(PROMPT_TOKENS)),
            output_tokens_max=output_tokens,
            sampling=Sampling(temperature=0.0),
        )
        for number in range(SECONDS * PER_SECOND)
    ]
    made = scenario(*requests, blocks=4096)
    return play(replace(made, policy=policy, cluster=replace(made.cluster, cost=cost, queue_s=queue_s)))


@pytest.fixture(scope="module")
def bounded() -> SimCluster:
    return overload(10.0)


def lives(played: SimCluster) -> list[Life]:
    return list(played.server.journal.lives.values())


def in_time(played: SimCluster) -> int:
    """Count the requests that finished with their first token in time."""
    return sum(
        life.closes[0][1].outcome == "finished" and life.token_times_s[0] - life.request.arrived_at_s <= TTFT_S
        for life in lives(played)
    )


def test_the_deadline_keeps_the_goodput_at_the_capacity(bounded: SimCluster) -> None:
    finished = sum(life.closes[0][1].outcome == "finished" for life in lives(bounded))
    assert in_time(bounded) > 0.9 * finished
    assert in_time(bounded) > 2 * in_time(overload(None)), "without it, each request waits longer than the one before"


def steady(played: SimCluster) -> int:
    """Count the answers of slow decode workers that take at most twice as long as in a full batch."""
    limit_s = 2 * 20 * (0.01 + DECODE_BATCH * 0.01)
    times = [life.token_times_s for life in lives(played) if life.closes[0][1].outcome == "finished"]
    return sum(token_times_s[-1] - token_times_s[0] <= limit_s for token_times_s in times)


def test_the_deadline_keeps_the_goodput_of_slow_decode_workers() -> None:
    """A decode worker has half of the throughput needed. Without the deadline all streams take turns, ever longer."""
    held, open_to_all = (overload(queue_s, cost=SLOW_DECODE, output_tokens=20) for queue_s in (10.0, None))
    assert {life.closes[0][1].reject for life in lives(held)} == {None, "queue_deadline"}
    assert steady(held) > 2 * steady(open_to_all)


def test_a_prefill_worker_that_helps_slow_decode_workers_holds_requests_back_too() -> None:
    """Before, requests waited for no slot once it was mixed: fewer answers were steady than without its help."""
    static, adapted = (overload(10.0, cost=SLOW_DECODE, output_tokens=20, policy=name) for name in (POLICY, "baton"))
    assert steady(adapted) > 1.3 * steady(static)


def test_no_first_step_begins_after_the_deadline() -> None:
    """A worker has blocks for several prompts ahead; the last of them would begin 1.2 s later."""
    played = overload(1.0)
    waits_s = [life.started_at_s - life.request.arrived_at_s for life in lives(played) if life.started_at_s is not None]
    assert max(waits_s) <= 1.0 + 2 * LINK.delay_max_s
    assert any(life.closes[0][1].reject == "queue_deadline" for life in lives(played))


def test_the_refused_know_when_to_come_again(bounded: SimCluster) -> None:
    refused = [life.closes[0][1] for life in lives(bounded) if life.closes[0][1].outcome == "rejected"]
    assert refused
    assert {close.reject for close in refused} == {"queue_deadline"}
    assert all(close.retry_after_s is not None and close.retry_after_s >= 1.0 for close in refused)


def test_most_are_refused_at_once(bounded: SimCluster) -> None:
    """Waiting for a refusal is worse than the refusal."""
    refused = [life for life in lives(bounded) if life.closes[0][1].outcome == "rejected"]
    at_once = [life for life in refused if life.closes[0][0] - life.request.arrived_at_s < 0.1]
    assert len(at_once) > 0.8 * len(refused)


def test_refusals_are_replayed(bounded: SimCluster) -> None:
    decisions = bounded.server.journal.turns
    assert any(isinstance(decision.event, WorkerSaid) for decision in decisions)
    fresh = fresh_cluster(bounded.spec, play_policies(bounded.spec, POLICY))
    assert replay(fresh, decisions) == (len(decisions), None)


def test_roles_adapt_to_the_arrivals_that_are_refused(bounded: SimCluster) -> None:
    """Refusals keep the queue short, but the decode worker still helps with prompts."""
    adapted = overload(10.0, policy="baton")
    assert in_time(adapted) > 1.3 * in_time(bounded)
