"""Fits of step profiles: they find the prices that made one, stay sane on noise, and tell the error on unseen steps."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError
from baton.core.types import StepShape, prefill_pairs
from baton.decide.cost.fitted import (
    FittedCost,
    StepPoint,
    StepProfile,
    fit_cost,
    fit_nonnegative,
    load_fitted,
    load_step_profile,
    save_fitted,
)

TRUTH = FittedCost(
    start_s=0.004, band_s=(0.0001, 0.0002, 0.0004, 0.0005, 0.0005), sequence_s=0.0003, decode_s=0.0002,
    pair_s=2e-8, context_token_s=4e-7,
)  # fmt: skip


def measured(random: Random, noise_ratio: float) -> StepProfile:
    """A log of an engine that costs what TRUTH says, give or take."""
    points: list[StepPoint] = []
    for _ in range(400):
        new, cached = random.choice([0, 0, random.randint(1, 2000)]), random.randint(0, 3000)
        requests = random.randint(0 if new else 1, 64)
        shape = StepShape(
            prefill_tokens=new, prefill_chunks=1 if new else 0,
            prefill_pairs=prefill_pairs(new, cached), decode_requests=requests,
            context_tokens=requests * random.randint(1, 2000),
        )  # fmt: skip
        step_s = TRUTH.step_s(shape) * (1 + random.uniform(-noise_ratio, noise_ratio))
        points.append(StepPoint(**msgspec.structs.asdict(shape), step_s=step_s))
    return StepProfile(engine="truth", llm="none", points=tuple(points))


def prices(cost: FittedCost) -> list[float]:
    return [cost.start_s, *cost.band_s, cost.sequence_s, cost.decode_s, cost.pair_s, cost.context_token_s]


def test_a_clean_log_gives_back_the_prices_that_made_it() -> None:
    found = fit_cost(measured(Random(1), 0.0))
    assert found.error is not None
    assert found.error.worst_ratio < 1e-3
    assert found.error.points == 80, "every fifth step is held out"
    assert prices(found) == pytest.approx(prices(TRUTH), rel=0.05, abs=2e-5)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_noise_stays_noise(seed: int) -> None:
    """5 % of noise at most leaves a mean error near its own mean, 2.5 %, on steps that the fit has not seen."""
    found = fit_cost(measured(Random(seed), 0.05))
    assert found.error is not None
    assert found.error.mean_ratio < 0.035
    assert min(prices(found)) >= 0


def test_the_error_is_that_of_unseen_steps() -> None:
    """Every fifth step takes ten times as long: a fit that had seen those would not be so wrong about them."""
    clean = measured(Random(2), 0.0)
    points = tuple(
        msgspec.structs.replace(point, step_s=10 * point.step_s) if index % 5 == 0 else point
        for index, point in enumerate(clean.points)
    )
    found = fit_cost(msgspec.structs.replace(clean, points=points))
    assert found.error is not None
    assert found.error.mean_ratio == pytest.approx(0.9, abs=0.001)
    assert prices(found) == pytest.approx(prices(TRUTH), rel=0.05, abs=2e-5)


def test_a_fit_survives_its_file() -> None:
    found = fit_cost(measured(Random(3), 0.02))
    assert load_fitted(save_fitted(found)) == found


def test_bands_have_no_seams() -> None:
    """One token more costs the price of its band, on both sides of every border."""
    times_s = [TRUTH.step_s(StepShape(prefill_tokens=tokens, prefill_chunks=1)) for tokens in range(1, 700)]
    rises = [after - before for before, after in pairwise(times_s)]
    assert min(rises) == pytest.approx(0.0001)
    assert max(rises) == pytest.approx(0.0005)


@given(requests=st.integers(1, 600), context=st.integers(0, 100_000), steps=st.integers(0, 30))
def test_a_run_is_its_steps_to_the_last_bit(requests: int, context: int, steps: int) -> None:
    shapes = [StepShape(decode_requests=requests, context_tokens=context + n * requests) for n in range(steps)]
    run_s = TRUTH.decode_run_s(requests=requests, context_tokens=context, steps=steps)
    assert list(run_s) == [TRUTH.step_s(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a step profile"),
        ('{"engine": "e", "llm": "m", "points": [{"step_s": 1.0}]}', "at least 10 points .* this one has 1"),
        ('{"engine": "e", "llm": "m", "points": [' + ", ".join(['{"step_s": 0.0}'] * 10) + "]}", "10 are not above 0"),
        ('{"engine": "e", "llm": "m", "points": [{"step": 1.0}]}', "unknown field `step`"),
    ],
)  # fmt: skip
def test_profiles_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_step_profile(text)


@pytest.mark.parametrize(("text", "said"), [("{}", "missing required field"), ("[", "not a fitted cost model")])
def test_fits_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_fitted(text)


def test_a_fit_with_other_bands_is_refused() -> None:
    short = msgspec.structs.replace(TRUTH, band_s=(0.1, 0.2))
    with pytest.raises(ConfigError, match="needs 5 prices in band_s, this one has 2"):
        load_fitted(save_fitted(short))


@settings(max_examples=60)
@given(
    st.integers(1, 6).flatmap(
        lambda count: st.lists(st.lists(st.integers(-9, 9), min_size=count + 1, max_size=count + 1), min_size=count)
    )
)
def test_least_squares_ends_where_no_unknown_can_improve(table: list[list[int]]) -> None:
    """The conditions of Karush, Kuhn and Tucker: nothing negative, no slope at the positive, none downhill at zero."""
    rows, wanted = [[float(x) for x in row[:-1]] for row in table], [float(row[-1]) for row in table]
    found = fit_nonnegative(rows, wanted)
    rests = [
        value - sum(a * x for a, x in zip(row, found, strict=True)) for row, value in zip(rows, wanted, strict=True)
    ]
    slopes = [sum(row[column] * rest for row, rest in zip(rows, rests, strict=True)) for column in range(len(found))]
    assert min(found) >= 0
    for x, slope in zip(found, slopes, strict=True):
        assert slope < 1e-4
        assert x == 0 or abs(slope) < 1e-4


def test_noise_does_not_make_a_fit_quicker_than_what_was_measured() -> None:
    """Relative to what was measured, lucky steps would count most: with this noise the sum would be 18 % too low."""
    log = measured(Random(3), 0.5)
    found = fit_cost(log)
    predicted_s = sum(found.step_s(point) for point in log.points)
    assert predicted_s == pytest.approx(sum(point.step_s for point in log.points), rel=0.03)
