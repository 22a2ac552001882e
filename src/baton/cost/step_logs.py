"""A fitted cost model straight from what workers wrote down of their steps (`step_log` of `baton serve`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.cost.fitted import FittedCost, StepPoint, StepProfile, fit_cost, load_fitted, load_step_profile

POINTS_MIN = 50
"""Steps of which fewer say nothing: seven prices are fitted, and every fifth step is kept to tell the error."""


class _LoggedPoint(StepPoint, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A line of a step log: it says more than a profile's point."""


def read_fitted(path: Path) -> FittedCost:
    """Read a saved fit, or fit what lies there: a step profile, a worker's step log, a folder of step logs.

    Raises ConfigError for a file that is none of them, or that has too few steps.
    """
    try:
        if path.is_dir():
            return _fit(path, sorted(path.glob("*.jsonl")))
        if path.suffix == ".jsonl":
            return _fit(path, [path])
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: {error}") from error
    return fit_cost(load_step_profile(text)) if _has_points(text) else load_fitted(text)


def _has_points(text: str) -> bool:
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return isinstance(raw, dict) and "points" in raw


def _fit(path: Path, logs: list[Path]) -> FittedCost:
    points = tuple(point for log in logs for point in _points(log))
    if len(points) < POINTS_MIN:
        raise ConfigError(
            f"{path}: {len(points)} steps in {len(logs)} step logs, and a fit needs {POINTS_MIN}; serve more requests "
            "with `step_log` set, of all lengths that count"
        )
    return fit_cost(StepProfile(engine="step logs", llm="", machine=str(path), points=points))


def _points(log: Path) -> list[StepPoint]:
    """The steps of a log. A last line without its end was being written: it is left out."""
    lines = log.read_bytes().split(b"\n")[:-1]
    try:
        points = [msgspec.json.decode(line, type=_LoggedPoint) for line in lines]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{log}: not a step log: {error}") from error
    return [point for point in points if point.step_s > 0]
