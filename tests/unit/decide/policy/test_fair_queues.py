"""Virtual token counters: order, lifting, and the bound that the paper proves."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from msgspec.structs import replace

from baton.core.types import Request, Slo
from baton.decide.policy.fairness import SloOrder
from baton.decide.policy.vtc import VirtualTokenCounter
from tests.unit.decide.policy.views import request


@dataclass(slots=True)
class Running:
    request: Request
    left_tokens: int


def test_the_least_served_tenant_is_next_and_its_own_requests_come_in_order() -> None:
    counters = VirtualTokenCounter()
    first, second, other = (
        request("1", tenant="a", arrived_at_s=0.0),
        request("2", tenant="a", arrived_at_s=1.0),
        request("3", tenant="b", arrived_at_s=2.0),
    )
    for waiting in (first, second, other):
        counters.joined(waiting)
    counters.left(first)
    counters.began(first, expected_tokens=3.0)
    counters.served(first, output_tokens=5)
    assert counters.counter("a") == first.prompt_tokens + 2 * 5
    assert sorted((first, second, other), key=counters.key) == [other, first, second]


def test_a_predicted_answer_is_charged_at_once_and_corrected_at_the_end() -> None:
    counters = VirtualTokenCounter(predicted_ratio=0.5)
    short, long = request("1", tenant="short"), request("2", tenant="long")
    for begun in (short, long):
        counters.began(begun, expected_tokens=20.0)
        assert counters.counter(begun.tenant) == begun.prompt_tokens + 2 * 10
    counters.served(short, output_tokens=4)
    counters.served(long, output_tokens=8)
    counters.served(long, output_tokens=8)
    assert counters.counter("long") == long.prompt_tokens + 2 * 16, "6 more than was charged in advance"
    counters.ended(short)
    counters.ended(long)
    assert counters.counter("short") == short.prompt_tokens + 2 * 4
    assert counters.counter("long") == long.prompt_tokens + 2 * 16


def test_a_weight_divides_the_service() -> None:
    counters = VirtualTokenCounter(weights={"paid": 4.0})
    for tenant in ("paid", "free"):
        counters.served(request(tenant=tenant), output_tokens=10)
    assert (counters.counter("paid"), counters.counter("free")) == (5.0, 20.0)
    with pytest.raises(ValueError, match="must be above 0"):
        VirtualTokenCounter(weights={"paid": 0.0})


def test_a_tenant_that_comes_back_is_lifted_to_the_least_served_of_the_waiting() -> None:
    """An idle tenant earns no credit."""
    counters = VirtualTokenCounter()
    busy = request("1", tenant="busy")
    counters.joined(busy)
    counters.began(replace(busy, prompt_tokens=100), expected_tokens=0.0)
    counters.joined(request("2", tenant="late"))
    assert counters.counter("late") == 100


def test_after_an_empty_queue_a_tenant_is_lifted_to_where_the_last_one_left() -> None:
    counters = VirtualTokenCounter()
    last = request("1", tenant="last")
    counters.joined(last)
    counters.began(replace(last, prompt_tokens=70), expected_tokens=0.0)
    counters.left(last)
    counters.joined(request("2", tenant="next"))
    assert counters.counter("next") == 70


def test_a_tenant_that_left_no_longer_sets_the_lift() -> None:
    counters = VirtualTokenCounter()
    gone, there = request("1", tenant="gone"), request("2", tenant="there")
    counters.joined(gone)
    counters.joined(there)
    counters.began(replace(there, prompt_tokens=50), expected_tokens=0.0)
    counters.left(gone)
    counters.joined(request("3", tenant="new"))
    assert counters.counter("new") == 50


def test_tenants_that_wait_for_nothing_are_forgotten_beyond_the_bound() -> None:
    counters = VirtualTokenCounter(tenants_max=2)
    for name in ("a", "b", "c"):
        counters.joined(request(name, tenant=name))
        counters.began(request(name, tenant=name, prompt_tokens=ord(name)), expected_tokens=0.0)
        counters.left(request(name, tenant=name))
    assert counters.counter("a") == 0
    assert counters.counter("c") > 0


def test_counters_that_running_requests_bring_back_are_forgotten_again() -> None:
    counters = VirtualTokenCounter(tenants_max=2)
    for name in ("a", "b", "c", "d"):
        counters.joined(request(name, tenant=name))
        counters.left(request(name, tenant=name))
        for tenant in "abc":
            counters.served(request(tenant, tenant=tenant), output_tokens=ord(tenant))
    counters.joined(request("e", tenant="e"))
    assert [name for name in "abcd" if counters.counter(name)] == ["c"]


def test_a_tenant_beyond_the_bound_is_not_the_one_dropped() -> None:
    """Its counter was raised to 10, below that of an idle tenant: the lift must not be lost."""
    counters = VirtualTokenCounter(tenants_max=2)
    waiting, idle, late = (request(name, tenant=name) for name in ("waiting", "idle", "late"))
    for served, prompt_tokens in ((waiting, 10), (idle, 30)):
        counters.joined(served)
        counters.began(replace(served, prompt_tokens=prompt_tokens), expected_tokens=0.0)
    counters.left(idle)
    counters.joined(late)
    assert [counters.counter(name) for name in ("waiting", "late", "idle")] == [10.0, 10.0, 0.0]


def test_two_backlogged_tenants_stay_within_the_bound_of_the_paper() -> None:
    """Theorem 4.4: |W_f - W_g| <= 2 max(w_p L_input, w_q M), here with M = 8 requests of at most 200 tokens."""
    draw, counters = Random(1), VirtualTokenCounter()
    prompts = {"f": (10, 50), "g": (100, 200)}
    served = dict.fromkeys(prompts, 0.0)
    waiting: list[Request] = []
    running: list[Running] = []
    worst = 0.0
    for step in range(2000):
        for tenant, (low, high) in prompts.items():
            while sum(asked.tenant == tenant for asked in waiting) < 9:
                asked = request(tenant=tenant, prompt_tokens=draw.randint(low, high), arrived_at_s=step)
                counters.joined(asked)
                waiting.append(asked)
        while len(running) < 8:
            chosen = min(waiting, key=counters.key)
            waiting.remove(chosen)
            counters.left(chosen)
            counters.began(chosen, expected_tokens=0.0)
            served[chosen.tenant] += chosen.prompt_tokens
            running.append(Running(chosen, draw.randint(1, 100)))
        for entry in running:
            counters.served(entry.request, output_tokens=1)
            served[entry.request.tenant] += 2
            entry.left_tokens -= 1
        running = [entry for entry in running if entry.left_tokens]
        worst = max(worst, abs(served["f"] - served["g"]))
    assert worst <= 2 * max(1 * 200, 2 * 8 * 200)
    assert min(served.values()) > 10_000


def test_later_requests_of_any_priority_break_no_slo() -> None:
    """With a TTFT SLO of 4 s, priority moves a request by at most 1 s, so a request 2 s later cannot overtake."""
    slo = Slo(ttft_s=4.0, tpot_s=0.05)

    def place(priority: int, arrived_at_s: float, slo: Slo | None = slo) -> tuple[float, ...]:
        return SloOrder().key(replace(request(arrived_at_s=arrived_at_s, slo=slo), priority=priority))

    assert place(1_000, 0.0) < place(-1_000, 2.0)
    assert place(1_000, 0.0) > place(-1_000, 1.9), "within what the promise bears, priority decides"
    assert place(0, 0.0) < place(0, 0.1)
    assert place(3, 5.0, None) > place(-2, 9.0, None), "without a promise, it decides alone"
    assert place(-1, 5.0, None) < place(-1_000, 0.0) < place(1, 0.0, None)
