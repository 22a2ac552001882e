"""Fit a cost model to the step logs of workers (`step_log` of `baton serve`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.decide.cost.fitted import FittedCost, StepPoint, StepProfile, fit_cost, load_fitted, load_step_profile

POINTS_MIN = 50
"""Minimum number of steps for a fit: ten prices are fitted, and every fifth step is held out."""


class LoggedStep(StepPoint, frozen=True, kw_only=True):
    """A line of a step log. `step_s` covers commands, plan, forward pass and report."""

    at_s: float
    """Start of the step, on the host's clock."""
    engine_s: float
    """The forward pass alone."""


def read_fitted(path: Path) -> FittedCost:
    """Read a saved fit, or fit a step profile, a worker's step log, or a folder of step logs.

    Raise ConfigError for any other file, or for too few steps.
    """
    with in_file(path, "the prices of steps"):
        if path.is_dir():
            return _fit(path, sorted(path.glob("*.jsonl")))
        if path.suffix == ".jsonl":
            return _fit(path, [path])
        text = path.read_text(encoding="utf-8")
        return fit_cost(load_step_profile(text)) if _has_points(text) else load_fitted(text)


def _has_points(text: str) -> bool:
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return isinstance(raw, dict) and "points" in raw


def _fit(path: Path, logs: list[Path]) -> FittedCost:
    points = tuple(step for log in logs for step in read_step_log(log) if step.step_s > 0)
    if len(points) < POINTS_MIN:
        raise ConfigError(
            f"{len(points)} steps in {len(logs)} step logs, and a fit needs {POINTS_MIN}; serve more requests "
            "with `step_log` set, of all lengths that count"
        )
    return fit_cost(StepProfile(engine="step logs", llm="", machine=str(path), points=points))


def read_step_log(path: Path) -> list[LoggedStep]:
    """Read a worker's step log without an incomplete last line. Raise ConfigError if it is not a step log."""
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [msgspec.json.decode(line, type=LoggedStep) for line in lines]
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is no step log, or not a step log of this version: {error}; "
            "`step_log` in the configuration writes one"
        ) from error
