"""Least squares with prices that are not negative, for a dozen unknowns; this half of the house takes no library."""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float]]
ROUNDS_MAX = 200
"""The method ends after a few rounds per unknown; this bounds it where rounding would make it circle."""


def fit_nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Find x >= 0 that makes |rows x - wanted| smallest.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, on normal equations with columns
    scaled to length 1.
    """
    count = len(rows[0])
    scales = [sum(row[column] ** 2 for row in rows) ** 0.5 for column in range(count)]
    columns = [column for column in range(count) if scales[column] > 0]
    gram = [[sum(row[a] * row[b] for row in rows) / (scales[a] * scales[b]) for b in columns] for a in columns]
    target = [sum(row[a] * value for row, value in zip(rows, wanted, strict=True)) / scales[a] for a in columns]
    solution = _active_set(gram, target)
    found = [0.0] * count
    for column, value in zip(columns, solution, strict=True):
        found[column] = value / scales[column]
    return found


def _active_set(gram: Matrix, target: list[float]) -> list[float]:
    count = len(target)
    free: list[int] = []
    x = [0.0] * count
    for _ in range(ROUNDS_MAX):
        slopes = [target[a] - sum(gram[a][b] * x[b] for b in range(count)) for a in range(count)]
        held = [a for a in range(count) if a not in free and slopes[a] > 1e-9]
        if not held:
            break
        free.append(max(held, key=lambda a: slopes[a]))
        x = _retreat(gram, target, free, x)
    return x


def _retreat(gram: Matrix, target: list[float], free: list[int], x: list[float]) -> list[float]:
    """Solve for the free unknowns; while one turns negative, go only as far as zero and hold it there."""
    while free:
        part = _solve([[gram[a][b] for b in free] for a in free], [target[a] for a in free])
        if min(part) > 0:
            return _spread(part, free, len(x))
        steps = [x[a] / (x[a] - value) for a, value in zip(free, part, strict=True) if value <= 0 and x[a] > value]
        step = min(steps, default=0.0)
        x = [old + step * (new - old) for old, new in zip(x, _spread(part, free, len(x)), strict=True)]
        worst = min(zip(part, free, strict=True))[1]
        still = [a for a in free if x[a] > 1e-12]
        free[:] = still if len(still) < len(free) else [a for a in free if a != worst]
        x = [value if a in free else 0.0 for a, value in enumerate(x)]
    return x


def _spread(part: list[float], free: list[int], count: int) -> list[float]:
    whole = [0.0] * count
    for a, value in zip(free, part, strict=True):
        whole[a] = value
    return whole


def _solve(matrix: Matrix, target: list[float]) -> list[float]:
    """Gauss with pivots, and a whiff of ridge for columns that say the same."""
    size = len(target)
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for index in range(size):
        rows[index][index] += 1e-12
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(column + 1, size):
            factor = rows[row][column] / rows[column][column]
            rows[row] = [value - factor * above for value, above in zip(rows[row], rows[column], strict=True)]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(rows[row][column] * solution[column] for column in range(row + 1, size))
        solution[row] = (rows[row][size] - known) / rows[row][row]
    return solution
