"""Waiting in front of a pool of workers, in closed form. Good enough to screen; what is kept is simulated."""

from __future__ import annotations

import math


def waiting_ratio(workers: int, busy_ratio: float) -> float:
    """Share of arrivals that find all workers busy (Erlang C), Poisson arrivals."""
    if busy_ratio >= 1:
        return 1.0
    load = workers * busy_ratio
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - busy_ratio * (1 - blocked))


def wait_scale_s(*, workers: int, busy_ratio: float, service_s: float, variation: float) -> float:
    """Mean wait of those that wait. `variation`: squared coefficient of variation of the service time.

    Source: Allen and Cunneen's approximation for M/G/k; for one worker the formula of Pollaczek and Khinchine.
    """
    return service_s * (1 + variation) / 2 / (workers * (1 - busy_ratio))


def within_ratio(*, limit_s: float, waiting: float, scale_s: float) -> float:
    """Share of arrivals that wait at most `limit_s`: those that wait do so exponentially."""
    if limit_s < 0:
        return 0.0
    return 1 - waiting * math.exp(-limit_s / scale_s) if scale_s > 0 else 1.0


def normal_quantile(ratio: float) -> float:
    """Standard normal quantile, within 0.00045. Source: Abramowitz and Stegun, 26.2.23."""
    if ratio < 0.5:
        return -normal_quantile(1 - ratio)
    t = math.sqrt(-2 * math.log(max(1e-12, 1 - ratio)))
    top = 2.515517 + 0.802853 * t + 0.010328 * t * t
    return t - top / (1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t**3)
