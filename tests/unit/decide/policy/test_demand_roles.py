"""Roles that adapt: which pressure flips a worker, and which does not. Times were computed by hand (`views.COST`)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from baton.core.types import ClusterView, LoadWindow, Role, WorkerId, WorkerView
from baton.decide.policy.demand import DemandRoles
from tests.unit.decide.policy.test_demand import window
from tests.unit.decide.policy.views import COST, cluster, worker

TICKS = range(1, 31)
PROMPTS = [window(float(second), arrived=3, prompt_tokens=490, output_tokens=2) for second in TICKS]
"""3 prompts of 0.5 s in a second: 1.5 workers. Without an SLO, TTFT may be 4 s, 8 times that of an idle worker."""
ANSWERS = [window(float(second), arrived=6, prompt_tokens=20, output_tokens=300) for second in TICKS]
"""A step of one request takes 11 ms, so TPOT may be 44 ms: 34 requests in a batch."""


def flips(view: ClusterView, history: list[LoadWindow], roles: DemandRoles | None = None) -> Mapping[WorkerId, Role]:
    return (roles or DemandRoles()).assign(view, history, COST, history[-1].end_s)


def prompts(name: str, *, queued: int = 0) -> WorkerView:
    """A prefill worker with so many prompts of 490 tokens in its queue."""
    return worker(name, queued_tokens=490 * queued, queued_requests=queued)


def answers(name: str, role: Role = "decode", *, running: int = 0) -> WorkerView:
    return worker(name, role, running_requests=running, context_tokens=100 * running)


LATE = cluster(prompts("p0", queued=10), prompts("p1", queued=10), answers("d0", running=3), answers("d1", running=2))
"""Each prefill worker has prompts for 5 s, and decode has time left."""
SLOW = cluster(worker("p0", queued_tokens=20), prompts("p1"), answers("d0", running=70), answers("d1", running=70))
"""A step of decode takes 80 ms, nearly twice TPOT, and prefill has time left."""


def test_one_request_flips_no_worker() -> None:
    """Before, one prompt of 93 tokens took every worker but one from decode."""
    lone = [window(1.0, arrived=1, prompt_tokens=93, output_tokens=0)]
    for running in (0, 1):
        view = cluster(prompts("p0", queued=running), answers("d0"), answers("d1"), answers("d2"))
        assert flips(view, lone) == {}


def test_a_few_long_prompts_at_once_flip_no_worker() -> None:
    few = [window(1.0, arrived=4, prompt_tokens=490, output_tokens=0)]
    assert flips(LATE, few) == {}


def test_slow_workers_flip_for_requests_that_are_few_in_ten_seconds() -> None:
    """Before, no worker flipped unless 8 requests arrived within 10 s."""
    rare = [window(float(second), arrived=second % 5 == 0, prompt_tokens=490, output_tokens=2) for second in range(41)]
    assert flips(LATE, rare) == {"d1": "prefill"}
    assert flips(LATE, rare[:35]) == {}, "seven requests say little"


def test_prompts_that_are_late_get_the_decode_worker_with_the_least_load() -> None:
    assert flips(LATE, PROMPTS) == {"d1": "prefill"}


def test_answers_that_are_slow_get_the_prefill_worker_with_the_shortest_queue() -> None:
    assert flips(SLOW, ANSWERS) == {"p1": "decode"}


def test_no_worker_flips_while_both_phases_meet_their_targets() -> None:
    """2.5 s of prompts per worker against 4 s, and steps of 30 ms against 44 ms."""
    busy = [prompts(name, queued=4) for name in ("p0", "p1")]
    view = cluster(*busy, answers("d0", running=20), answers("d1", running=20))
    assert flips(view, PROMPTS) == {}


def test_no_worker_leaves_a_phase_that_is_busy_itself() -> None:
    view = cluster(
        prompts("p0", queued=10), prompts("p1", queued=10), answers("d0", running=70), answers("d1", running=70)
    )
    assert flips(view, PROMPTS) == {}


def test_no_worker_leaves_a_phase_whose_recent_arrivals_need_it() -> None:
    """The queues are empty at this moment, but the prompts of a second take 5 s."""
    view = cluster(*(prompts(f"p{n}") for n in range(4)), answers("d0", running=70), answers("d1", running=70))
    busy = [window(float(second), arrived=10, prompt_tokens=490, output_tokens=10) for second in TICKS]
    assert flips(view, busy) == {}


def test_one_worker_of_each_phase_stays() -> None:
    assert flips(cluster(prompts("p0", queued=40), prompts("p1", queued=40), answers("d0")), PROMPTS) == {}
    assert flips(cluster(prompts("p0"), answers("d0", running=90), answers("d1", running=90)), ANSWERS) == {}
    assert flips(cluster(prompts("p0", queued=40), answers("d0")), PROMPTS) == {}


def test_mixed_workers_stay_mixed() -> None:
    mixed = (worker(name, "mixed", queued_tokens=9000, queued_requests=9) for name in ("m0", "m1", "m2"))
    assert flips(cluster(*mixed), PROMPTS) == {}


def test_a_worker_stays_in_its_new_role_for_a_while() -> None:
    """The load turns at once. No worker flips back before 10 s have passed."""
    roles = DemandRoles()
    assert roles.assign(SLOW, ANSWERS, COST, 30.0) == {"p1": "decode"}
    turned = cluster(prompts("p0", queued=40), answers("p1"), answers("d0"), answers("d1"))
    late = [*ANSWERS, *(window(30.0 + second, arrived=20, prompt_tokens=490, output_tokens=2) for second in TICKS)]
    assert [roles.assign(turned, late, COST, now_s) for now_s in (31.0, 35.0, 39.0)] == [{}] * 3
    assert set(roles.assign(turned, late, COST, 41.0).values()) == {"prefill"}


def test_a_large_fleet_flips_several_workers_at_once() -> None:
    many = [prompts(f"p{n}", queued=20) for n in range(12)] + [answers(f"d{n:02}") for n in range(20)]
    heavy = [window(float(second), arrived=30, prompt_tokens=490, output_tokens=2) for second in TICKS]
    assert len(flips(cluster(*many), heavy)) == 4


def test_the_slo_of_the_requests_is_the_target_where_they_have_one() -> None:
    """5 s of prompts are a risk for a TTFT of 4 s, and none for 20 s."""
    few = [window(float(second), arrived=2, prompt_tokens=490, output_tokens=2) for second in TICKS]
    assert flips(LATE, few) == {"d1": "prefill"}
    assert flips(LATE, [replace(each, slo_ttft_s=20.0, slo_tpot_s=0.1) for each in few]) == {}
