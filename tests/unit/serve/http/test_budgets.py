"""Budgets of clients: each client has its own, and everything that a request reserved is given back."""

from __future__ import annotations

import pytest

from baton.core.errors import RequestError
from baton.core.keys import KeyLimits
from baton.core.limits import LimitsConfig
from baton.serve.http import budgets as module
from baton.serve.http.budgets import Budgets, RateLimit, RequestBudget
from baton.serve.http.wire.errors import ClusterError

LIMITS = LimitsConfig(client_requests_max=2, client_body_bytes_max=2048, body_bytes_max=3072)
NONE = KeyLimits()


def begin(budgets: Budgets, name: str, own: KeyLimits = NONE, *, now_s: float = 0.0) -> RequestBudget:
    return budgets.begin(name, own, is_counted=True, now_s=now_s)


def test_a_client_has_so_many_requests_at_once() -> None:
    budgets = Budgets(LIMITS)
    first = begin(budgets, "a")
    begin(budgets, "a")
    with pytest.raises(
        ClusterError, match=r"2 requests of this client.*at most 2.*limits\.client_requests_max"
    ) as error:
        begin(budgets, "a")
    assert error.value.status == 429
    begin(budgets, "b")
    first.end()
    first.end()
    begin(budgets, "a")
    with pytest.raises(ClusterError):
        begin(budgets, "a")


def test_the_limits_of_a_key_replace_the_common_ones() -> None:
    budgets = Budgets(LIMITS)
    one = KeyLimits(streams_max=1)
    begin(budgets, "a", one)
    with pytest.raises(ClusterError, match="at most 1"):
        begin(budgets, "a", one)


def test_bodies_of_a_client_and_of_all_clients_are_bounded() -> None:
    budgets = Budgets(LIMITS)
    first, second = begin(budgets, "a"), begin(budgets, "b")
    first.take_bytes(2048)
    with pytest.raises(ClusterError, match=r"2048 bytes.*limits\.client_body_bytes_max") as own:
        begin(budgets, "a").take_bytes(1)
    assert own.value.status == 429
    second.take_bytes(1024)
    with pytest.raises(ClusterError, match=r"3072 bytes.*limits\.body_bytes_max") as common:
        second.take_bytes(1)
    assert common.value.status == 503
    first.release_body()
    second.take_bytes(1024)
    first.end()
    second.end()
    begin(budgets, "a").take_bytes(2048)


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (LimitsConfig(client_body_bytes_max=2048), "limits.client_body_bytes_max"),
        (LimitsConfig(body_bytes_max=2048), "limits.body_bytes_max"),
    ],
)
def test_a_body_that_never_fits_is_not_to_be_sent_again(limits: LimitsConfig, setting: str) -> None:
    """A batch would send it each second for ever."""
    budget = begin(Budgets(limits), "a")
    budget.take_bytes(2000)
    with pytest.raises(RequestError, match=rf"2049 bytes or more, at most 2048 are allowed \({setting}\)") as refused:
        budget.take_bytes(49)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_requests_per_minute() -> None:
    """Three at once, then one every 20 s."""
    budgets = Budgets(LimitsConfig())
    own = KeyLimits(requests_per_minute=3)
    for _ in range(3):
        begin(budgets, "a", own).end()
    with pytest.raises(ClusterError, match="3 requests a minute") as error:
        begin(budgets, "a", own, now_s=5.0)
    assert error.value.retry_after_s == pytest.approx(15.0)
    begin(budgets, "a", own, now_s=20.0).end()
    with pytest.raises(ClusterError):
        begin(budgets, "a", own, now_s=20.0)


def test_tokens_per_minute_are_charged_when_they_are_known() -> None:
    """One request may overdraw; then the client waits until the minutes have made up for it."""
    budgets = Budgets(LimitsConfig(client_tokens_per_minute=600))
    request = begin(budgets, "a")
    request.charge(1200, 0.0)
    request.end()
    with pytest.raises(ClusterError, match="600 tokens a minute") as error:
        begin(budgets, "a", now_s=30.0)
    assert error.value.retry_after_s == pytest.approx(30.1)
    begin(budgets, "a", now_s=60.2).end()


def test_a_changed_rate_counts_anew_and_an_equal_one_goes_on() -> None:
    budgets = Budgets(LimitsConfig())
    begin(budgets, "a", KeyLimits(requests_per_minute=1)).end()
    with pytest.raises(ClusterError):
        begin(budgets, "a", KeyLimits(requests_per_minute=1))
    begin(budgets, "a", KeyLimits(requests_per_minute=2)).end()


def test_other_requests_count_by_their_bodies_only() -> None:
    budgets = Budgets(LIMITS)
    many = [budgets.begin("a", NONE, is_counted=False, now_s=0.0) for _ in range(10)]
    many[0].take_bytes(2048)
    with pytest.raises(ClusterError):
        many[1].take_bytes(1)
    for budget in many:
        budget.end()
    begin(budgets, "a")


def test_forgotten_clients_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of a forgotten client still gives back what it has."""
    monkeypatch.setattr(module, "CLIENTS_MAX", 2)
    budgets = Budgets(LIMITS)
    first = begin(budgets, "a")
    first.take_bytes(2048)
    begin(budgets, "b")
    begin(budgets, "c")
    first.end()
    begin(budgets, "d").take_bytes(2048)


def test_a_rate_never_exceeds_the_amount_of_a_minute() -> None:
    rate = RateLimit(60, 0.0)
    rate.take(60, 1e6)
    assert rate.wait_s(1e6) == pytest.approx(1.0)


def test_a_client_has_one_number() -> None:
    """Steps are shared by it. Two connections of an address are one client."""
    budgets = Budgets(LIMITS)
    numbers = [begin(budgets, name).client_number for name in ("a", "b", "a")]
    assert numbers[0] == numbers[2] != numbers[1]
    assert all(numbers)
