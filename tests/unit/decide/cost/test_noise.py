"""The scatter of step times is found in step logs, and drawn again by the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec
import pytest

from baton.decide.cost.fitted import LoggedStep, read_fitted
from baton.decide.cost.noise import StepNoise, TimedStep, fit_noise
from baton.lab.sim.noise import HostSpeed, StepDraws

NOISE = StepNoise(step_sigma=0.08, speed_sigma=0.2, speed_s=2.0, stalls_per_s=0.1, stall_s=0.5)


def drawn(noise: StepNoise, steps: int, *, predicted_s: float = 0.02, seed: int = 0) -> Iterator[TimedStep]:
    """Yield the steps of a worker that never waits."""
    draws, now_s = StepDraws(noise, HostSpeed(Random(seed)), Random(seed + 1)), 0.0
    for _ in range(steps):
        step_s = draws.taken_s(predicted_s, now_s)
        yield TimedStep(now_s, step_s, predicted_s)
        now_s += step_s


def test_a_fit_finds_the_noise_that_was_drawn() -> None:
    found = fit_noise([list(drawn(NOISE, 40_000, seed=seed)) for seed in (1, 7)])
    assert found is not None
    assert found.step_sigma == pytest.approx(NOISE.step_sigma, rel=0.1)
    assert found.speed_sigma == pytest.approx(NOISE.speed_sigma, rel=0.15)
    assert found.speed_s == pytest.approx(NOISE.speed_s, rel=0.5)
    assert found.stalls_per_s == pytest.approx(NOISE.stalls_per_s, rel=0.25)
    assert found.stall_s == pytest.approx(NOISE.stall_s, rel=0.25)


def test_steps_take_the_predicted_time_on_average() -> None:
    taken_s = [step.step_s for seed in range(20) for step in drawn(NOISE, 5_000, seed=3 * seed)]
    assert fmean(taken_s) == pytest.approx(0.02, rel=0.05)


def test_equal_seeds_draw_equal_steps() -> None:
    assert list(drawn(NOISE, 50)) == list(drawn(NOISE, 50))
    assert list(drawn(NOISE, 50)) != list(drawn(NOISE, 50, seed=5))


def test_steps_without_scatter_have_none() -> None:
    steps = [TimedStep(0.1 * index, 0.02, 0.02) for index in range(100)]
    found = fit_noise([steps])
    assert found is not None
    assert (found.step_sigma, found.speed_sigma, found.stalls_per_s) == (0.0, 0.0, 0.0)
    assert [step.step_s for step in drawn(found, 3)] == [0.02, 0.02, 0.02]


def test_too_few_steps_have_no_noise() -> None:
    assert fit_noise([[TimedStep(0.0, 0.02, 0.02)]]) is None
    assert fit_noise([]) is None


def test_a_folder_of_step_logs_gives_prices_with_noise(tmp_path: Path) -> None:
    for worker in range(2):
        lines = [
            msgspec.json.encode(
                LoggedStep(
                    decode_requests=1, context_tokens=64, at_s=step.at_s, step_s=step.step_s, engine_s=step.step_s
                )
            )
            for step in drawn(StepNoise(step_sigma=0.2), 400, seed=worker)
        ]
        (tmp_path / f"worker-{worker}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    noise = read_fitted(tmp_path).noise
    assert noise is not None
    assert noise.step_sigma == pytest.approx(0.2, rel=0.15)
