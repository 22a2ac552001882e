"""How step times scatter around their prediction: fitted from step logs, drawn by the simulator.

A step takes its predicted time, times a slow factor (the machine's speed, which changes slowly and which successive
steps share), times a factor of its own. Both factors are log-normal. Some steps stall: a stall adds a time. The mean is
the predicted time, because prices are fitted to mean times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean, median

from msgspec import Struct

from baton.core.validation import Price, Seconds

STALL_RATIO = 2.0
"""A step has stalled if its ratio of actual to predicted time is more than this many times the median ratio."""
LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Distances, in steps, at which the correlation of the scatter is measured."""
LAG_RATIO_MIN = 0.1
"""The fit uses lags up to the first whose covariance is below this share of the shortest one's. The rest is chance."""
STEPS_MIN = 2 * LAGS[0] + 1
"""Minimum steps of all logs for a fit."""
SPEED_S_MIN = 1e-3
"""Minimum of `StepNoise.speed_s`."""


class StepNoise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The distribution of actual / predicted step time, whose mean is 1."""

    step_sigma: Price = 0.0
    """Standard deviation of the logarithm of each step's own factor."""
    speed_sigma: Price = 0.0
    """Standard deviation of the logarithm of the slow factor. Steps within about `speed_s` have nearly the same one."""
    speed_s: Seconds = 1.0
    """Time in which the correlation of the slow factor falls to 1/e."""
    stalls_per_s: Price = 0.0
    """Stalls per second of predicted step time."""
    stall_s: Seconds = 0.0
    """Mean length of a stall."""

    @property
    def usual_ratio(self) -> float:
        """Mean of actual / predicted time over steps without a stall."""
        return max(0.0, 1.0 - self.stalls_per_s * self.stall_s)


class TimedStep(Struct, frozen=True, gc=False):
    """A step of a log: when it began, and its actual and predicted time."""

    at_s: float
    step_s: float
    predicted_s: float

    @property
    def ratio_log(self) -> float:
        """Logarithm of actual / predicted time."""
        return log(self.step_s / self.predicted_s)


def fit_noise(workers: Sequence[Sequence[TimedStep]]) -> StepNoise | None:
    """Fit the scatter of step times. None: there are too few steps. `workers`: each worker's steps, in order."""
    timed = [[step for step in steps if step.step_s > 0 and step.predicted_s > 0] for steps in workers]
    every = [step for steps in timed for step in steps]
    if len(every) < STEPS_MIN:
        return None
    usual_ratio = exp(median(step.ratio_log for step in every))
    limit = STALL_RATIO * usual_ratio
    stalls_s = [
        step.step_s - usual_ratio * step.predicted_s for step in every if step.step_s > limit * step.predicted_s
    ]
    usual = [[step for step in steps if step.step_s <= limit * step.predicted_s] for steps in timed]
    centre_log = fmean(step.ratio_log for steps in usual for step in steps)
    series = [[(step.at_s, step.ratio_log - centre_log) for step in steps] for steps in usual if steps]
    variance = fmean(error * error for steps in series for _, error in steps)
    speed_variance, speed_s = _slow_part(series)
    speed_variance = min(variance, speed_variance)
    return StepNoise(
        step_sigma=(variance - speed_variance) ** 0.5,
        speed_sigma=speed_variance**0.5,
        speed_s=speed_s,
        stalls_per_s=len(stalls_s) / sum(step.predicted_s for step in every),
        stall_s=fmean(stalls_s) if stalls_s else 0.0,
    )


def _slow_part(series: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return the variance that neighbouring steps have in common, and the time in seconds in which it falls to 1/e.

    Fits an exponential to the covariances at growing distances, by least squares of their logarithms. `series`: pairs
    (begin of the step in seconds, logarithm of its factor) of each worker.
    """
    points: list[tuple[float, float]] = []  # (seconds between the steps, logarithm of their covariance)
    covariance_min = 0.0
    for lag in LAGS:
        pairs = [pair for steps in series for pair in zip(steps, steps[lag:], strict=False)]
        if not pairs:
            break
        covariance = fmean(first * second for (_, first), (_, second) in pairs)
        if covariance <= covariance_min:
            break
        covariance_min = covariance_min or LAG_RATIO_MIN * covariance
        points.append((fmean(late_s - early_s for (early_s, _), (late_s, _) in pairs), log(covariance)))
    if not points:
        return 0.0, 1.0
    mean_s, mean_log = (fmean(point[index] for point in points) for index in (0, 1))
    spread = sum((gap_s - mean_s) ** 2 for gap_s, _ in points)
    slope = sum((gap_s - mean_s) * (value - mean_log) for gap_s, value in points) / spread if spread else 0.0
    if slope >= 0.0:  # no decay over the distances that were seen
        return exp(mean_log), max(SPEED_S_MIN, points[-1][0])
    return exp(mean_log - slope * mean_s), max(SPEED_S_MIN, -1.0 / slope)
