"""Prices that are learned from steps follow the machine, whatever was configured."""

from __future__ import annotations

import math
from random import Random

import pytest

from baton.core.ports import CostModel
from baton.core.report_parts import StepPrices
from baton.core.types import HostId, StepShape, WorkerId, WorkerView, prefill_pairs
from baton.decide.cost.linear import LinearCost
from baton.decide.cost.online import LearnedCost, StepLearner, cost_of, step_parts
from baton.decide.cost.parallel import Parallel
from tests.unit.decide.cost.workers import worker

TRUE = LinearCost(
    step_overhead_s=0.02, prefill_token_s=0.0004, prefill_pair_s=1e-7, decode_request_s=0.002, context_token_s=1e-6
)
DEAR = LinearCost(
    step_overhead_s=20.0, prefill_token_s=0.4, prefill_pair_s=1e-4, decode_request_s=2.0, context_token_s=1e-3
)
SKEWED = LinearCost(step_overhead_s=0.06, prefill_token_s=0.0002, decode_request_s=0.001, context_token_s=4e-6)
"""A start of three times the true price, tokens and requests of half of it."""


def draw_shape(draw: Random, kind: str) -> StepShape:
    requests = 0 if kind == "prefill" else draw.randint(1, 16)
    context_tokens = requests * draw.randint(50, 800)
    if kind == "decode" or (kind == "mixed" and draw.random() < 0.7):
        return StepShape(decode_requests=requests, context_tokens=context_tokens)
    tokens = draw.randint(10, 512)
    return StepShape(
        prefill_tokens=tokens,
        prefill_chunks=1,
        prefill_pairs=prefill_pairs(tokens, draw.choice((0, 200))),
        decode_requests=requests,
        context_tokens=context_tokens,
    )


def errors_over(
    learner: StepLearner, draw: Random, kind: str, steps: int, *, factor: float = 1.0, noise: float = 0.0
) -> list[float]:
    """Return the relative error of the prediction of each step, against its time without noise."""
    errors: list[float] = []
    for _ in range(steps):
        shape = draw_shape(draw, kind)
        true_s = factor * TRUE.step_s(shape)
        errors.append(abs(learner.cost.step_s(shape) / true_s - 1.0))
        learner.observe(shape, true_s * math.exp(draw.gauss(0.0, noise)))
    return errors


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_30_steps_after_a_change_of_speed_predictions_are_within_20_percent(
    kind: str, factor: float, noise: float
) -> None:
    draw, learner = Random(3), StepLearner(TRUE)
    errors_over(learner, draw, kind, 200, noise=noise)
    errors_over(learner, draw, kind, 30, factor=factor, noise=noise)
    after = errors_over(learner, draw, kind, 50, factor=factor, noise=noise)
    assert max(after) < 0.2


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_prices_a_thousand_times_too_high_are_right_after_30_steps(kind: str) -> None:
    draw, learner = Random(5), StepLearner(DEAR)
    errors_over(learner, draw, kind, 30)
    assert max(errors_over(learner, draw, kind, 50)) < 0.2


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_prices_that_are_wrong_in_different_directions_are_learned_apart(kind: str) -> None:
    draw, learner = Random(7), StepLearner(SKEWED)
    errors_over(learner, draw, kind, 150)
    after = errors_over(learner, draw, kind, 50)
    unlearned = StepLearner(SKEWED)
    before = [abs(unlearned.cost.step_s(shape) / TRUE.step_s(shape) - 1) for shape in (draw_shape(draw, kind),)]
    assert sum(after) / len(after) < min(0.1, before[0])


def test_a_single_stall_changes_the_next_prediction_little() -> None:
    draw, learner = Random(11), StepLearner(TRUE)
    errors_over(learner, draw, "mixed", 50)
    shape = draw_shape(draw, "mixed")
    learner.observe(shape, 100 * TRUE.step_s(shape))
    assert max(errors_over(learner, draw, "mixed", 1)) < 0.7


def test_a_phase_without_prompts_does_not_forget_their_price() -> None:
    draw, learner = Random(13), StepLearner(SKEWED)
    errors_over(learner, draw, "mixed", 200)
    errors_over(learner, draw, "decode", 1000)
    prompts = [draw_shape(draw, "prefill") for _ in range(20)]
    assert max(abs(learner.cost.step_s(shape) / TRUE.step_s(shape) - 1) for shape in prompts) < 0.3


def test_the_error_bar_is_the_noise_of_the_steps() -> None:
    learner = StepLearner(TRUE)
    errors_over(learner, Random(17), "decode", 300, noise=0.2)
    assert learner.prices is not None
    assert 0.1 < learner.prices.error_ratio < 0.4


@pytest.mark.parametrize(
    "cost",
    [
        TRUE,
        worker("llama3.1-8b", "h100", Parallel(tp=1), "vllm-v1"),
        LinearCost(prefill_token_s=0.0, prefill_pair_s=0.0),
    ],
)
def test_the_parts_of_a_step_are_the_step(cost: CostModel) -> None:
    draw = Random(19)
    for kind in ("prefill", "decode", "mixed"):
        shape = draw_shape(draw, kind)
        assert sum(step_parts(cost, shape)) == pytest.approx(cost.step_s(shape))


def test_a_learned_model_without_a_correction_is_the_given_one() -> None:
    cost = LearnedCost(TRUE, StepPrices(1.0, (1.0,) * 5))
    assert cost.prefill_s(new_tokens=300, cached_tokens=50) == pytest.approx(
        TRUE.prefill_s(new_tokens=300, cached_tokens=50)
    )
    run_s = cost.decode_run_s(requests=3, context_tokens=90, steps=4)
    assert run_s == pytest.approx(TRUE.decode_run_s(requests=3, context_tokens=90, steps=4))
    assert cost.prefill_s(new_tokens=0, cached_tokens=10) == 0.0
    assert cost.handoff_s(tokens=10, same_host=False) == TRUE.handoff_s(tokens=10, same_host=False)


def test_prices_of_a_speed_alone_scale_every_step() -> None:
    given = LinearCost()
    learned = LearnedCost(given, StepPrices(2.5, ()))
    for shape in (StepShape(), StepShape(prefill_tokens=64, prefill_chunks=1, decode_requests=3, context_tokens=900)):
        assert learned.step_s(shape) == 2.5 * given.step_s(shape)


def test_a_worker_is_predicted_with_its_own_prices() -> None:
    slow = StepPrices(3.0, (1.0,) * 5)
    view = WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed")
    learned = WorkerView(id=WorkerId("w"), host=HostId("h"), role="mixed", prices=slow)
    shape = StepShape(decode_requests=2, context_tokens=100)
    assert cost_of(view, TRUE) is TRUE
    assert cost_of(learned, TRUE).step_s(shape) == pytest.approx(3.0 * TRUE.step_s(shape))


def test_prices_are_reported_when_they_have_changed() -> None:
    draw, learner = Random(23), StepLearner(TRUE)
    assert not learner.take_report_due(is_due=False)
    errors_over(learner, draw, "decode", 1)
    assert learner.take_report_due(is_due=False)
    errors_over(learner, draw, "decode", 20)
    assert not learner.take_report_due(is_due=False), "every step took as long as predicted"
    errors_over(learner, draw, "decode", 5, factor=3.0)
    assert learner.take_report_due(is_due=False)
    assert learner.take_report_due(is_due=True)


def test_further_rows_have_the_time_of_their_tile() -> None:
    """Weights are read once for each four rows: a fifth row costs as much as four further ones."""
    learner = StepLearner(LinearCost())
    for turn in range(400):
        rows = turn % 8 + 1
        learner.observe(StepShape(decode_requests=rows, context_tokens=rows * 100), 0.01 if rows <= 4 else 0.02)
    times_s = learner.grown_s(StepShape(decode_requests=3, context_tokens=300), 5)
    assert times_s == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.02, 0.02], rel=0.1)


def test_an_old_time_of_a_number_of_rows_is_forgotten() -> None:
    """It may come from a step that another program slowed down, and rows that are expensive are not tried."""
    learner = StepLearner(LinearCost())
    one = StepShape(decode_requests=1, context_tokens=100)
    for _ in range(100):
        learner.observe(one, 0.01)
    expected_s = learner.grown_s(one, 1)[1]
    for _ in range(5):
        learner.observe(StepShape(decode_requests=2, context_tokens=200), 0.05)
    assert learner.grown_s(one, 1)[1] > 1.5 * expected_s
    for _ in range(2000):
        learner.observe(one, 0.01)
    assert learner.grown_s(one, 1)[1] < 1.5 * expected_s
