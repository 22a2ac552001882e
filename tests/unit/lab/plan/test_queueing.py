"""Closed forms of waiting, against textbook values and against a queue that is played."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from baton.lab.plan.capacity import wait_scale_s, waiting_ratio, within_ratio


@pytest.mark.parametrize(
    ("workers", "busy", "expected"), [(1, 0.7, 0.7), (2, 0.5, 1 / 3), (10, 0.8, 0.40918), (3, 1.2, 1.0)]
)
def test_erlangs_formula(workers: int, busy: float, expected: float) -> None:
    assert waiting_ratio(workers, busy) == pytest.approx(expected, rel=1e-3)


def played(workers: int, rate_rps: float, service_s: float, limit_s: float) -> float:
    """Share of 40,000 Poisson arrivals that wait at most `limit_s` for one of the workers; service takes as long."""
    draw, now_s, met = Random(5), 0.0, 0
    free_s = [0.0] * workers
    for _ in range(40_000):
        now_s += draw.expovariate(rate_rps)
        start_s = max(now_s, heapq.heappop(free_s))
        met += start_s - now_s <= limit_s
        heapq.heappush(free_s, start_s + service_s)
    return met / 40_000


@pytest.mark.parametrize(("workers", "busy", "limit_s"), [(1, 0.6, 1.0), (1, 0.8, 2.0), (3, 0.8, 0.5), (4, 0.9, 1.0)])
def test_waiting_times_are_those_of_a_queue_that_is_played(workers: int, busy: float, limit_s: float) -> None:
    """Within 4 points of a percentage: good enough to screen."""
    scale_s = wait_scale_s(workers=workers, busy_ratio=busy, service_s=1.0, variation=0.0)
    found = within_ratio(limit_s=limit_s, waiting=waiting_ratio(workers, busy), scale_s=scale_s)
    assert found == pytest.approx(played(workers, busy * workers, 1.0, limit_s), abs=0.04)


def test_a_limit_that_has_passed_is_met_by_nobody() -> None:
    assert within_ratio(limit_s=-0.1, waiting=0.0, scale_s=1.0) == 0.0
