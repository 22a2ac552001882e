"""Closed-form queueing times of a pool of workers, for screening. The simulator verifies the best fleets."""

from __future__ import annotations

import math


def waiting_ratio(workers: int, busy_ratio: float) -> float:
    """Return the share of Poisson arrivals that find all workers busy (Erlang C)."""
    if busy_ratio >= 1:
        return 1.0
    load = workers * busy_ratio
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - busy_ratio * (1 - blocked))


def wait_scale_s(*, workers: int, busy_ratio: float, service_s: float, variation: float) -> float:
    """Return the mean wait of requests that wait. `variation`: squared coefficient of variation of the service time.

    Source: Allen-Cunneen approximation for M/G/k, which for one worker is the Pollaczek-Khinchine formula.
    """
    return service_s * (1 + variation) / 2 / (workers * (1 - busy_ratio))


def within_ratio(*, limit_s: float, waiting: float, scale_s: float) -> float:
    """Return the share of arrivals that wait at most `limit_s`, if waits are exponentially distributed."""
    if limit_s < 0:
        return 0.0
    return 1 - waiting * math.exp(-limit_s / scale_s) if scale_s > 0 else 1.0


def normal_quantile(ratio: float) -> float:
    """Return the standard normal quantile, within 0.00045. Source: Abramowitz and Stegun, 26.2.23."""
    if ratio < 0.5:
        return -normal_quantile(1 - ratio)
    t = math.sqrt(-2 * math.log(max(1e-12, 1 - ratio)))
    top = 2.515517 + 0.802853 * t + 0.010328 * t * t
    return t - top / (1 + 1.432788 * t + 0.189269 * t * t + 0.001308 * t**3)
