"""Roles that adapt: which pressure flips a worker, and which does not. Times were computed by hand (`views.COST`)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from baton.core.types import ClusterView, HostId, LoadWindow, Role, WorkerId, WorkerView
from baton.decide.policy.demand_roles import DemandRoles
from tests.unit.decide.policy.test_demand import window
from tests.unit.decide.policy.views import COST, cluster, worker

TICKS = range(1, 31)
PROMPTS = [window(float(second), arrived=3, prompt_tokens=490, output_tokens=2) for second in TICKS]
"""3 prompts of 0.5 s in a second: 1.5 workers. Without an SLO, TTFT may be 4 s, 8 times that of an idle worker."""
ANSWERS = [window(float(second), arrived=6, prompt_tokens=20, output_tokens=300) for second in TICKS]
"""A step of one request takes 11 ms, so TPOT may be 44 ms: 34 requests in a batch."""


def flips(view: ClusterView, history: list[LoadWindow], roles: DemandRoles | None = None) -> Mapping[WorkerId, Role]:
    return roles_at(roles or DemandRoles(), view, history, history[-1].end_s)


def roles_at(roles: DemandRoles, view: ClusterView, history: list[LoadWindow], now_s: float) -> dict[WorkerId, Role]:
    changes = roles.assign(view, history, COST, now_s)
    assert all(change.reason for change in changes.values())
    return {worker: change.role for worker, change in changes.items()}


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
    """At first: after some seconds it becomes mixed."""
    assert flips(cluster(prompts("p0", queued=40), prompts("p1", queued=40), answers("d0")), PROMPTS) == {}
    assert flips(cluster(prompts("p0"), answers("d0", running=90), answers("d1", running=90)), ANSWERS) == {}


def test_mixed_workers_stay_mixed() -> None:
    mixed = (worker(name, "mixed", queued_tokens=9000, queued_requests=9) for name in ("m0", "m1", "m2"))
    assert flips(cluster(*mixed), PROMPTS) == {}


def test_a_worker_stays_in_its_new_role_for_a_while() -> None:
    """The load turns at once. No worker flips back before 10 s have passed."""
    roles = DemandRoles()
    assert roles_at(roles, SLOW, ANSWERS, 30.0) == {"p1": "decode"}
    turned = cluster(prompts("p0", queued=40), answers("p1"), answers("d0"), answers("d1"))
    late = [*ANSWERS, *(window(30.0 + second, arrived=20, prompt_tokens=490, output_tokens=2) for second in TICKS)]
    assert [roles_at(roles, turned, late, now_s) for now_s in (31.0, 35.0, 39.0)] == [{}] * 3
    assert set(roles_at(roles, turned, late, 41.0).values()) == {"prefill"}


def test_a_large_fleet_flips_several_workers_at_once() -> None:
    many = [prompts(f"p{n}", queued=20) for n in range(12)] + [answers(f"d{n:02}") for n in range(20)]
    heavy = [window(float(second), arrived=30, prompt_tokens=490, output_tokens=2) for second in TICKS]
    assert len(flips(cluster(*many), heavy)) == 4


def test_the_slo_of_the_requests_is_the_target_where_they_have_one() -> None:
    """5 s of prompts are a risk for a TTFT of 4 s, and none for 20 s."""
    few = [window(float(second), arrived=2, prompt_tokens=490, output_tokens=2) for second in TICKS]
    assert flips(LATE, few) == {"d1": "prefill"}
    assert flips(LATE, [replace(each, slo_ttft_s=20.0, slo_tpot_s=0.1) for each in few]) == {}


def test_a_change_says_why() -> None:
    (change,) = DemandRoles().assign(LATE, PROMPTS, COST, 30.0).values()
    assert change.reason.startswith("2P2D is at ")
    assert "; 3P1D at " in change.reason


def test_requests_that_wait_for_a_worker_count_as_load() -> None:
    """The fair queue holds prompts back, so the queues of the workers stay short."""
    view = replace(cluster(prompts("p0"), prompts("p1"), answers("d0"), answers("d1")), waiting_requests=20)
    few = [window(float(second), arrived=1, prompt_tokens=490, output_tokens=2) for second in TICKS]
    assert flips(view, few) == {"d0": "prefill"}
    assert flips(replace(view, waiting_requests=0), few) == {}


def test_answers_beyond_the_batch_limit_are_late() -> None:
    """20 requests on a worker that decodes 10 at once: every second step has their token."""
    few = [replace(answers(f"d{n}", running=20), requests_max=10) for n in range(2)]
    view = cluster(prompts("p0"), prompts("p1"), *few)
    rare = [window(float(second), arrived=1, prompt_tokens=20, output_tokens=50) for second in TICKS]
    assert flips(view, rare) == {"p0": "decode"}
    assert flips(cluster(prompts("p0"), prompts("p1"), *(replace(each, requests_max=20) for each in few)), rare) == {}


def test_the_reserves_of_classes_keep_workers_in_their_phase() -> None:
    """Three quarters of the two decode workers are reserved: both stay, whatever the prompts need."""
    assert flips(LATE, PROMPTS, DemandRoles(decode_ratio_min=0.75)) == {}
    assert flips(LATE, PROMPTS, DemandRoles(decode_ratio_min=0.5)) == {"d1": "prefill"}
    assert flips(SLOW, ANSWERS, DemandRoles(prefill_ratio_min=0.75)) == {}


BUSY_PAIR = cluster(prompts("p0", queued=12), answers("d0"))
"""Prompts for 6 s, against 4 s, beside a decode worker without work."""


def test_the_last_decode_worker_computes_prompts_too_after_some_seconds_of_overload() -> None:
    """Before, a fleet of two workers never adapted."""
    roles = DemandRoles()
    assert [roles_at(roles, BUSY_PAIR, PROMPTS, 30.0 + second) for second in range(5)] == [{}] * 5
    assert roles_at(roles, BUSY_PAIR, PROMPTS, 35.0) == {"d0": "mixed"}


def test_no_worker_becomes_mixed_while_prompts_come_nearly_in_time() -> None:
    """Prompts in the same steps cost the answers nearly all of their TPOT. Before, a tenth of the answers was late."""
    busy = [window(float(second), arrived=4, prompt_tokens=490, output_tokens=2) for second in TICKS]
    view, roles = cluster(prompts("p0", queued=4), prompts("p1", queued=4), answers("d0")), DemandRoles()
    assert [roles_at(roles, view, busy, 30.0 + second) for second in range(10)] == [{}] * 10


def test_the_last_prefill_worker_decodes_too() -> None:
    roles, view = DemandRoles(), cluster(prompts("p0"), answers("d0", running=70))
    assert [roles_at(roles, view, ANSWERS, second) for second in (30.0, 32.0, 35.0)] == [{}, {}, {"p0": "mixed"}]


def test_an_overload_that_pauses_begins_anew() -> None:
    roles, idle = DemandRoles(), cluster(prompts("p0"), answers("d0"))
    few = [window(float(second), arrived=1, prompt_tokens=10, output_tokens=2) for second in TICKS]
    seen = [(BUSY_PAIR, PROMPTS, 30.0), (idle, few, 33.0), (BUSY_PAIR, PROMPTS, 36.0), (BUSY_PAIR, PROMPTS, 40.0)]
    assert [roles_at(roles, *each) for each in seen] == [{}] * 4
    assert roles_at(roles, BUSY_PAIR, PROMPTS, 41.0) == {"d0": "mixed"}


def mixed_pair(roles: DemandRoles, *, queued: int) -> ClusterView:
    """Let the decode worker become mixed at 35 s. Return the cluster with this queue."""
    for now_s in (30.0, 35.0):
        roles_at(roles, BUSY_PAIR, PROMPTS, now_s)
    return cluster(prompts("p0", queued=queued), answers("d0", "mixed"))


def test_a_mixed_worker_returns_to_its_phase_when_the_load_is_low() -> None:
    roles = DemandRoles()
    eased = mixed_pair(roles, queued=0)
    few = [window(30.0 + second, arrived=1, prompt_tokens=10, output_tokens=2) for second in TICKS]
    assert [roles_at(roles, eased, few, second) for second in (36.0, 45.0)] == [{}, {}], "it keeps its role for 10 s"
    assert roles_at(roles, eased, few, 46.0) == {"d0": "decode"}


def test_a_mixed_worker_stays_while_the_load_is_high() -> None:
    roles = DemandRoles()
    assert roles_at(roles, mixed_pair(roles, queued=8), PROMPTS, 50.0) == {}


def test_a_mixed_worker_that_restarts_returns_to_its_first_phase() -> None:
    roles = DemandRoles()
    eased = mixed_pair(roles, queued=0)
    few = [window(30.0 + second, arrived=1, prompt_tokens=10, output_tokens=2) for second in TICKS]
    assert roles_at(roles, cluster(prompts("p0")), few, 36.0) == {}
    assert roles_at(roles, eased, few, 47.0) == {"d0": "decode"}


CACHED = [
    replace(
        window(float(second), arrived=3, prompt_tokens=4000, output_tokens=2), begun_requests=3, cached_tokens=10800
    )
    for second in TICKS
]
"""A handoff between hosts takes 0.4 s, so 1.2 links are busy."""


def spread(view: ClusterView) -> ClusterView:
    """Give each worker a host of its own."""
    return replace(view, workers=tuple(replace(each, host=HostId(f"h-{each.id}")) for each in view.workers))


def test_no_worker_leaves_decode_hosts_whose_links_are_busy() -> None:
    """Before, one decode host was left for the KV of all prompts: 5 % of the requests met their targets."""
    assert flips(LATE, CACHED) == {"d1": "prefill"}
    assert flips(spread(LATE), CACHED) == {}


NO_SPLIT = [window(float(second), arrived=3, prompt_tokens=490, output_tokens=40) for second in TICKS]
"""Prompts keep 1.5 of three workers busy, answers 0.9: two prefill workers leave too little for the answers."""


EASY = {"ttft_s": 2.0, "tpot_s": 0.1}


def late_three(roles: DemandRoles, until_s: float) -> list[dict[WorkerId, Role]]:
    busy = [window(float(second), arrived=4, prompt_tokens=490, output_tokens=40) for second in TICKS]
    view = cluster(prompts("p0", queued=9), prompts("p1", queued=9), answers("d0", running=30))
    return [roles_at(roles, view, busy, 30.0 + second) for second in range(round(until_s) - 29)]


def test_all_workers_become_mixed_while_no_split_serves_the_load() -> None:
    """Prompts need 2 workers and answers 0.4: three workers are enough, and no split of them is."""
    roles = DemandRoles(**EASY)
    *before, last = late_three(roles, 35.0)
    assert before == [{}] * 5
    assert last == {"p0": "mixed", "p1": "mixed", "d0": "mixed"}
    mixed = cluster(*(worker(name, "mixed", queued_tokens=20) for name in ("p0", "p1", "d0")))
    assert roles_at(roles, mixed, NO_SPLIT, 36.0) == {}
    few = [window(float(second), arrived=1, prompt_tokens=200, output_tokens=20) for second in TICKS]
    assert roles_at(roles, mixed, few, 45.0) == {}, "they keep their roles for 10 s"
    assert roles_at(roles, mixed, NO_SPLIT, 50.0) == {}, "no split is predicted to have time left"
    assert sorted(roles_at(roles, mixed, few, 51.0).values()) == ["decode", "prefill", "prefill"]


def test_reserves_of_classes_keep_workers_from_becoming_mixed() -> None:
    assert not any(
        "mixed" in changes.values() for changes in late_three(DemandRoles(prefill_ratio_min=0.5, **EASY), 40.0)
    )


def test_a_mixed_worker_goes_to_the_phase_that_is_late_with_another_one() -> None:
    """Before, it stayed mixed beside two prefill workers without work."""
    roles = DemandRoles()
    pair = cluster(prompts("p0", queued=12), prompts("p1", queued=12), answers("d0"))
    heavy = [replace(each, arrived_requests=8, arrived_tokens=8 * 490) for each in PROMPTS]
    assert [roles_at(roles, pair, heavy, 30.0 + second) for second in range(6)][-1] == {"d0": "mixed"}
    turned = cluster(prompts("p0"), prompts("p1"), answers("d0", "mixed", running=90))
    assert [roles_at(roles, turned, ANSWERS, now_s) for now_s in (36.0, 46.0)] == [{}, {"d0": "decode", "p0": "decode"}]
