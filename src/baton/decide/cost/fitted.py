"""A cost model fitted to measured steps of an engine, or to the step logs of workers (`step_log` of `baton serve`).

Use it for the machine that was measured.

    step = start + sum over bands of tokens (price per token in the band) + sequences + pairs + context

Prices are never negative, so more work never makes a step cheaper. Bands let the price of a token depend on the size of
the step: few tokens cost little beside reading the weights, many are limited by arithmetic.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.core.types import StepShape, prompt_step
from baton.core.validation import Price, Seconds, out_of_range
from baton.decide.cost.noise import StepNoise, TimedStep, fit_noise

BANDS = (8, 32, 128, 512)
"""Token counts at which the price of a token changes."""
PROFILE_VERSION = 1
_REWEIGHTINGS = 3
ROUNDS_MAX = 1000
"""Bound on the rounds of the solver, which needs a few per unknown."""
POINTS_MIN = 50
"""Minimum number of logged steps for a fit: ten prices are fitted, and every fifth step is held out."""
HELD_OUT_EVERY = 5
"""Every fifth point is held out of the fit, to measure its error."""


class StepPoint(StepShape, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step: its shape and its seconds."""

    step_s: float


class StepProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured steps of one engine with one model on one machine."""

    version: int = PROFILE_VERSION
    engine: str
    llm: str
    machine: str = ""
    points: tuple[StepPoint, ...]


class FitError(Struct, frozen=True, kw_only=True):
    """Relative error of a fit on held-out steps."""

    points: int
    mean_ratio: float
    p90_ratio: float
    worst_ratio: float


class FittedCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted cost model. Implements `CostModel`; saved and loaded as JSON."""

    engine: str = ""
    llm: str = ""
    machine: str = ""
    start_s: Seconds
    """Seconds of an empty step."""
    band_s: tuple[Price, ...]
    """Seconds per token in each band: below `BANDS[0]`, between neighbours, and above the last."""
    sequence_s: Price
    """Seconds per request in the step, for logits and sampling."""
    decode_s: Price
    """Additional seconds per decoding request."""
    pair_s: Price
    context_token_s: Price
    handoff_local_s: Seconds = 0.0005
    handoff_token_s: Price = 0.0
    """Seconds per token of a handoff between hosts, if known."""
    error: FitError | None = None
    noise: StepNoise | None = None
    """How step times scatter around these prices, for the simulator. None: not fitted to step logs."""

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        if new_tokens == 0:
            return 0.0
        return self.step_s(prompt_step(new_tokens, cached_tokens))

    def step_s(self, shape: StepShape) -> float:
        fixed_s = self._fixed_s(shape.prefill_tokens, shape.prefill_chunks, shape.decode_requests)
        return fixed_s + self.pair_s * shape.prefill_pairs + self.context_token_s * shape.context_tokens

    def _fixed_s(self, prompt_tokens: int, chunks: int, requests: int) -> float:
        bands_s = sum(
            price_s * tokens for price_s, tokens in zip(self.band_s, _bands(prompt_tokens + requests), strict=True)
        )
        return self.start_s + (bands_s + self.sequence_s * (chunks + requests) + self.decode_s * requests)

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        fixed_s = self._fixed_s(0, 0, requests)
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        return [fixed_s + self.context_token_s * read for read in reads]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return self.handoff_local_s + (0.0 if same_host else self.handoff_token_s * tokens)

    def on(self, kind: str) -> FittedCost:
        return self


def load_step_profile(text: str) -> StepProfile:
    """Decode a step profile. Raise ConfigError if it is invalid or has too few points."""
    try:
        log = msgspec.json.decode(text, type=StepProfile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"not a step profile: {error}; benchmarks/engine_profile.py writes one") from error
    bad = sum(1 for point in log.points if not point.step_s > 0)
    if bad or len(log.points) < 2 * HELD_OUT_EVERY:
        raise ConfigError(
            f"a step profile needs at least {2 * HELD_OUT_EVERY} points with step_s above 0: this one has "
            f"{len(log.points)}, of which {bad} are not above 0"
        )
    return log


def load_fitted(text: str) -> FittedCost:
    """Decode a saved fit. Raise ConfigError if it is invalid."""
    try:
        cost = msgspec.json.decode(text, type=FittedCost)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"not a fitted cost model: {error}; `fit_cost` makes one from a step profile") from error
    return checked(cost)


def checked(cost: FittedCost) -> FittedCost:
    """Return a fit after validation. Raise ConfigError if a price is missing or out of range."""
    if len(cost.band_s) != len(BANDS) + 1:
        raise ConfigError(
            f"a fitted cost model needs {len(BANDS) + 1} prices in band_s, this one has {len(cost.band_s)}"
        )
    wrong = out_of_range(cost)
    if wrong:
        raise ConfigError("\n".join(wrong))
    if cost.start_s + cost.band_s[0] + cost.sequence_s == 0:
        raise ConfigError(
            "a fitted cost model has a step of one token that takes no time: start_s, band_s[0] and sequence_s are all "
            "0; `fit_cost` makes one from a step profile"
        )
    return cost


def save_fitted(cost: FittedCost) -> str:
    """Return a fit as JSON, for `load_fitted`."""
    return msgspec.json.format(msgspec.json.encode(cost), indent=2).decode() + "\n"


def fit_cost(log: StepProfile) -> FittedCost:
    """Fit a profile and measure the error on every fifth point, which is held out.

    The fit minimizes relative errors, so short steps count as much as long ones. Errors are relative to a first fit and
    not to the measurements: otherwise steps that were fast by chance would weigh more, and the fit would be too low.
    """
    seen = [point for index, point in enumerate(log.points) if index % HELD_OUT_EVERY]
    held_out = [point for index, point in enumerate(log.points) if index % HELD_OUT_EVERY == 0]
    cost = _fit(log, seen, [point.step_s for point in seen])
    for _ in range(_REWEIGHTINGS):
        cost = _fit(log, seen, [cost.step_s(point) for point in seen])
    return msgspec.structs.replace(cost, error=fit_error(cost, held_out))


def _fit(log: StepProfile, points: Sequence[StepPoint], scales_s: Sequence[float]) -> FittedCost:
    """Fit with the error of each point divided by its scale."""
    rows = [[value / scale_s for value in _features(point)] for point, scale_s in zip(points, scales_s, strict=True)]
    prices = fit_nonnegative(rows, [point.step_s / scale_s for point, scale_s in zip(points, scales_s, strict=True)])
    return FittedCost(
        engine=log.engine,
        llm=log.llm,
        machine=log.machine,
        start_s=prices[0],
        sequence_s=prices[1],
        decode_s=prices[2],
        pair_s=prices[3],
        context_token_s=prices[4],
        band_s=tuple(prices[5:]),
    )


def fit_nonnegative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimizes |rows x - wanted|."""
    optimize: Any = importlib.import_module("scipy.optimize")  # late: a server does not need it
    matrix = np.array(rows, dtype=float)
    scales = np.sqrt((matrix**2).sum(axis=0))
    scales[scales == 0.0] = 1.0  # prices differ by orders of magnitude, so columns are scaled to length 1
    solution, _ = optimize.nnls(matrix / scales, np.array(wanted, dtype=float), maxiter=ROUNDS_MAX)
    return (solution / scales).tolist()


def fit_error(cost: FittedCost, points: Sequence[StepPoint]) -> FitError:
    """Return the relative errors of a fit on measured steps."""
    ratios = sorted(abs(cost.step_s(point) / point.step_s - 1) for point in points)
    return FitError(
        points=len(ratios),
        mean_ratio=sum(ratios) / len(ratios),
        p90_ratio=ratios[(len(ratios) - 1) * 9 // 10],
        worst_ratio=ratios[-1],
    )


def _features(point: StepPoint) -> list[float]:
    requests = float(point.decode_requests)
    sums = [1.0, point.prefill_chunks + requests, requests, point.prefill_pairs, float(point.context_tokens)]
    return [*sums, *_bands(point.prefill_tokens + point.decode_requests)]


def _bands(tokens: int) -> tuple[float, ...]:
    """Return the tokens in each band. Example: 40 tokens are 8, 24, 8, 0 and 0."""
    first, second, third, fourth = BANDS
    return (
        float(min(tokens, first)),
        float(min(max(tokens - first, 0), second - first)),
        float(min(max(tokens - second, 0), third - second)),
        float(min(max(tokens - third, 0), fourth - third)),
        float(max(tokens - fourth, 0)),
    )


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
            return _fit_logs(path, sorted(path.glob("*.jsonl")))
        if path.suffix == ".jsonl":
            return _fit_logs(path, [path])
        text = path.read_text(encoding="utf-8")
        return fit_cost(load_step_profile(text)) if _has_points(text) else load_fitted(text)


def _has_points(text: str) -> bool:
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return isinstance(raw, dict) and "points" in raw


def fit_logs(profile: StepProfile, workers: Sequence[Sequence[LoggedStep]]) -> FittedCost:
    """Fit prices to a profile of step logs, and the scatter of step times around these prices.

    `workers`: the steps of each worker's log, in order. The points of the profile are all of these steps.
    """
    cost = fit_cost(profile)
    timed = [[TimedStep(step.at_s, step.step_s, cost.step_s(step)) for step in steps] for steps in workers]
    return msgspec.structs.replace(cost, noise=fit_noise(timed))


def _fit_logs(path: Path, logs: list[Path]) -> FittedCost:
    workers = [[step for step in read_step_log(log) if step.step_s > 0] for log in logs]
    points = tuple(step for steps in workers for step in steps)
    if len(points) < POINTS_MIN:
        raise ConfigError(
            f"{len(points)} steps in {len(logs)} step logs, and a fit needs {POINTS_MIN}; serve more requests "
            "with `step_log` set, with prompts of all lengths that you expect"
        )
    return fit_logs(StepProfile(engine="step logs", llm="", machine=str(path), points=points), workers)


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
