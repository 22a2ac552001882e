"""Sample irregular times into bins of equal width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


def edges(start_s: float, end_s: float, bins: int) -> Values:
    """Return the borders of `bins` equal bins: [bins + 1]."""
    return np.linspace(start_s, max(end_s, start_s + 1e-9), bins + 1)


def step_means(times_s: Sequence[float], values: Sequence[float], borders: Values) -> Values:
    """Return the mean of a step function in each bin: [bins].

    Each value holds from its time to the next time; before the first time the value is 0. `times_s` must ascend.
    """
    times = np.asarray(times_s, np.float64)
    heights = np.asarray(values, np.float64)
    if not len(times):
        return np.zeros(len(borders) - 1)
    areas = np.concatenate(([0.0], np.cumsum(heights[:-1] * np.diff(times))))
    at = np.searchsorted(times, borders, side="right") - 1
    known = np.maximum(at, 0)
    until = np.where(at < 0, 0.0, areas[known] + heights[known] * (borders - times[known]))
    return np.diff(until) / np.diff(borders)


def open_counts(starts_s: Sequence[float], ends_s: Sequence[float], borders: Values) -> Values:
    """Return the mean number of open spans in each bin: [bins]."""
    changes = np.concatenate((np.asarray(starts_s, np.float64), np.asarray(ends_s, np.float64)))
    signs = np.concatenate((np.ones(len(starts_s)), -np.ones(len(ends_s))))
    order = np.argsort(changes, kind="stable")
    return step_means(changes[order].tolist(), np.cumsum(signs[order]).tolist(), borders)


def counts(times_s: Sequence[float] | Values, borders: Values) -> Values:
    """Return the number of times in each bin: [bins]."""
    return np.histogram(np.asarray(times_s, np.float64), borders)[0].astype(np.float64)


def quantiles(times_s: Values, values: Values, borders: Values, shares: Sequence[float]) -> Values:
    """Return the quantiles of the values in each bin, NaN for a bin without values: [shares, bins]."""
    found = np.full((len(shares), len(borders) - 1), np.nan)
    bins = np.clip(np.searchsorted(borders, times_s, side="right") - 1, 0, len(borders) - 2)
    order = np.argsort(bins, kind="stable")
    ends = np.searchsorted(bins[order], np.arange(len(borders)))
    for place, (start, end) in enumerate(pairwise(ends.tolist())):
        if end > start:
            found[:, place] = np.quantile(values[order[start:end]], shares)
    return found
