"""A cost model that learns from the steps of one worker.

The given cost model splits a step into parts: its start, decoding requests, their context, prompt tokens, and attention
pairs. Each part has a learned factor, and the whole step one more:

    step = speed * sum of (factor * part)

`speed` follows a change of the whole machine within about ten steps. The factors follow within about 50 steps, by
recursive least squares, and correct prices that are wrong in different directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

from msgspec import structs

from baton.core.ports import CostModel
from baton.core.report_parts import StepPrices
from baton.core.types import StepShape, WorkerView, prompt_step

PARTS = 5
_EMPTY = StepShape()
_GIVEN = StepPrices(1.0, (1.0,) * PARTS)
"""The prices of the given cost model."""
_SPEED_GAIN = 0.15
"""Share of a step's relative error by which `speed` changes. The first steps have a higher share."""
_ERROR_LOG_MAX = 1.0
"""Maximum relative error of a step, as a logarithm: one stalled step must not change the prices much."""
_FACTOR_MEMORY = 0.98
"""Weight of a sample of the factors, relative to the next sample."""
_RIDGE = 0.05
"""Weight of the present factors. A factor stays as it is while steps say nothing about its part."""
_CHANGE_MIN, _CHANGE_MAX = -0.5, 1.0
"""Bounds of the relative change of a factor by one step."""
_FACTOR_MIN, _FACTOR_MAX = 1e-6, 1e6
_ERROR_MEMORY = 0.95
_STEP_S_MIN = 1e-9
_SWEEPS = 4
_RATIO_GAIN = 0.3
"""Share by which a step changes the ratio of its number of rows."""
_RATIO_MEMORY = 0.999
"""Weight of a ratio, relative to one step later."""
_REPORT_LOG = 0.1
"""Relative change of the prices, as a logarithm, above which they are reported to the coordinator."""


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """A cost model with the learned factors of one worker. Implements `CostModel`."""

    given: CostModel
    prices: StepPrices

    def prefill_s(self, *, new_tokens: int, cached_tokens: int) -> float:
        if new_tokens == 0:
            return 0.0
        return self.step_s(prompt_step(new_tokens, cached_tokens))

    def step_s(self, shape: StepShape) -> float:
        if not self.prices.factors:
            return self.prices.speed * self.given.step_s(shape)
        return _priced_s(self.prices, step_parts(self.given, shape))

    def decode_run_s(self, *, requests: int, context_tokens: int, steps: int) -> Sequence[float]:
        reads = range(context_tokens, context_tokens + steps * requests, requests)
        return [self.step_s(StepShape(decode_requests=requests, context_tokens=read)) for read in reads]

    def handoff_s(self, *, tokens: int, same_host: bool) -> float:
        return self.given.handoff_s(tokens=tokens, same_host=same_host)

    def on(self, kind: str) -> LearnedCost:
        return self


def cost_of(worker: WorkerView, cost: CostModel) -> CostModel:
    """Return the cost model of a worker, corrected by its own steps if it has reported any."""
    given = cost.on(worker.kind)
    return given if worker.prices is None else LearnedCost(given, worker.prices)


def price_ratio(model: CostModel, prompt_tokens: int) -> float:
    """Return the learned time of a prompt divided by the time of the given model. 1.0 for a model without learning."""
    if not isinstance(model, LearnedCost):
        return 1.0
    given_s = model.given.prefill_s(new_tokens=prompt_tokens, cached_tokens=0)
    return model.prefill_s(new_tokens=prompt_tokens, cached_tokens=0) / max(_STEP_S_MIN, given_s)


def step_parts(cost: CostModel, shape: StepShape) -> list[float]:
    """Return the seconds of each part of a step: start, decoding requests, context, prompt tokens, attention pairs."""
    requests, tokens = shape.decode_requests, shape.prefill_tokens
    last_s = cost.step_s(_EMPTY)
    parts_s = [max(_STEP_S_MIN, last_s), 0.0, 0.0, 0.0, 0.0]
    if requests:
        alone_s = cost.step_s(StepShape(decode_requests=requests))
        read_s = cost.step_s(StepShape(decode_requests=requests, context_tokens=shape.context_tokens))
        parts_s[1], parts_s[2], last_s = max(0.0, alone_s - last_s), max(0.0, read_s - alone_s), read_s
    if tokens:
        no_pairs = StepShape(
            prefill_tokens=tokens,
            prefill_chunks=shape.prefill_chunks,
            decode_requests=requests,
            context_tokens=shape.context_tokens,
        )
        tokens_s, all_s = cost.step_s(no_pairs), cost.step_s(shape)
        parts_s[3], parts_s[4] = max(0.0, tokens_s - last_s), max(0.0, all_s - tokens_s)
    return parts_s


def _priced_s(prices: StepPrices, parts_s: Sequence[float]) -> float:
    total_s = sum(factor * part_s for factor, part_s in zip(prices.factors, parts_s, strict=True))
    return max(_STEP_S_MIN, prices.speed * total_s)


@dataclass(slots=True)
class StepLearner:
    """Learns the prices of one worker from its steps."""

    given: CostModel
    cost: CostModel = field(init=False)
    """Predicts the next steps: the given model until a step was observed, then the learned one."""
    prices: StepPrices | None = None
    """The learned prices. None: no step was observed."""
    row_ratios: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """Actual by predicted time of steps without prompts, by their number of rows, and the step that it is from.

    A model that is linear in rows does not know that a step grows where rows need a further tile of the hardware.
    """
    _is_report_due: bool = False
    """True if the prices differ much from those of the last report."""
    _reported: StepPrices | None = None
    """The prices of the last report."""
    _weights: list[list[float]] = field(default_factory=lambda: [[0.0] * PARTS for _ in range(PARTS)])
    """Normal matrix of the least squares: sums over past steps of the products of the shares of two parts."""

    def __post_init__(self) -> None:
        self.cost = self.given

    def take_report_due(self, *, is_due: bool) -> bool:
        """Return whether a report is due: `is_due`, or the prices have changed. Record that it contains the prices."""
        if is_due or self._is_report_due:
            self._is_report_due, self._reported = False, self.prices
            return True
        return False

    def observe(self, shape: StepShape, step_s: float) -> None:
        """Learn from a step of this shape that took `step_s`, unless it waited for the spill space."""
        if not step_s > 0 or shape.spilled_tokens:
            return
        before, parts_s = self.prices or _GIVEN, step_parts(self.given, shape)
        steps, error_log = before.steps + 1, log(step_s / _priced_s(before, parts_s))
        square = before.error_ratio**2
        if steps > 1:
            error_log = min(_ERROR_LOG_MAX, max(-_ERROR_LOG_MAX, error_log))
            if not shape.prefill_tokens:
                ratio = self._row_ratio(shape.decode_requests)
                self.row_ratios[shape.decode_requests] = (ratio + _RATIO_GAIN * (exp(error_log) - ratio), steps)
            memory = min(_ERROR_MEMORY, 1.0 - 1.0 / steps)
            square = memory * square + (1.0 - memory) * error_log**2
        speed = before.speed * exp(max(_SPEED_GAIN, 1.0 / steps) * error_log)
        fast = StepPrices(speed, before.factors)
        predicted_s = _priced_s(fast, parts_s)
        shares = [speed * factor * part_s / predicted_s for factor, part_s in zip(before.factors, parts_s, strict=True)]
        factors = self._fitted(before.factors, shares, step_s / predicted_s - 1.0)
        learned = self.prices = StepPrices(speed, factors, sqrt(square), steps)
        self.cost = LearnedCost(self.given, learned)
        reported_s = _priced_s(self._reported, parts_s) if self._reported is not None else 0.0
        if reported_s == 0.0 or abs(log(_priced_s(learned, parts_s) / reported_s)) > _REPORT_LOG:
            self._is_report_due = True

    def grown_s(self, shape: StepShape, rows: int) -> list[float]:
        """Return the predicted time of a step with 0, 1, ... `rows` further decoding rows of its mean context."""
        decoding = shape.decode_requests
        context_tokens = shape.context_tokens * (decoding + 1) // decoding
        larger = structs.replace(shape, decode_requests=decoding + 1, context_tokens=context_tokens)
        step_s = self.cost.step_s(shape)
        row_s = max(0.0, self.cost.step_s(larger) - step_s)
        ratios = (
            [1.0] * (rows + 1) if shape.prefill_tokens else [self._row_ratio(decoding + n) for n in range(rows + 1)]
        )
        return [(step_s + n * row_s) * ratio for n, ratio in enumerate(ratios)]

    def _row_ratio(self, rows: int) -> float:
        """Return the ratio of a number of rows. It falls back to 1 with time, so that old ones are measured again."""
        ratio, step = self.row_ratios.get(rows, (1.0, 0))
        steps = self.prices.steps if self.prices is not None else 0
        return 1.0 + (ratio - 1.0) * _RATIO_MEMORY ** (steps - step)

    def _fitted(self, factors: Sequence[float], shares: Sequence[float], error: float) -> tuple[float, ...]:
        """Return the factors after a step with this relative error. `shares`: share of each part in the predicted step.

        The unknowns are relative changes of the factors. A part that is not in the step keeps its weight.
        """
        weights, kept = self._weights, [sqrt(_FACTOR_MEMORY) if share else 1.0 for share in shares]
        for index, row in enumerate(weights):
            for other in range(PARTS):
                row[other] = row[other] * kept[index] * kept[other] + shares[index] * shares[other]
        error = min(_CHANGE_MAX, max(_CHANGE_MIN, error))
        changes = [0.0] * PARTS
        for _ in range(_SWEEPS):  # Gauss-Seidel. The next step's error contains what these sweeps leave.
            for index, row in enumerate(weights):
                others = sum(weight * change for weight, change in zip(row, changes, strict=True))
                rest = shares[index] * error - others + row[index] * changes[index]
                changes[index] = min(_CHANGE_MAX, max(_CHANGE_MIN, rest / (row[index] + _RIDGE)))
        changed = [factor * (1.0 + change) for factor, change in zip(factors, changes, strict=True)]
        return tuple(min(_FACTOR_MAX, max(_FACTOR_MIN, factor)) for factor in changed)
