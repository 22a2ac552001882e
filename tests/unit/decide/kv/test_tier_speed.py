"""What a tier is believed to take follows what it took."""

from __future__ import annotations

import pytest

from baton.decide.kv.tier import TierSpeed


def test_it_begins_as_it_was_given() -> None:
    assert TierSpeed(0.002, 0.001).load_s(10) == pytest.approx(0.012)


def test_a_few_reads_tell_latency_from_bandwidth() -> None:
    speed = TierSpeed(0.0, 1e-6)
    for blocks in (10, 200, 50, 400, 20, 100) * 3:
        speed.learn(blocks, 0.1 + 0.002 * blocks)
    assert speed.latency_s == pytest.approx(0.1, rel=0.2)
    assert speed.block_s == pytest.approx(0.002, rel=0.2)


def test_one_slow_read_is_enough_to_be_careful() -> None:
    speed = TierSpeed(0.001, 0.0001)
    speed.learn(50, 3.0)
    assert speed.load_s(50) > 2.5


def test_reads_of_one_size_are_predicted_well() -> None:
    speed = TierSpeed(0.001, 0.0001)
    for _ in range(20):
        speed.learn(64, 0.5)
    assert speed.load_s(64) == pytest.approx(0.5, rel=0.05)
    assert speed.load_s(1) >= 0.0


def test_skipped_reads_reduce_the_weight_of_slow_ones() -> None:
    speed = TierSpeed(0.001, 0.0001)
    speed.learn(50, 3.0)
    for _ in range(1000):
        speed.doubt()
    assert speed.load_s(50) == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("reads", [[(1, 5.0), (100, 0.1)], [(100, 9.0), (1, 0.0)], [(1, 0.0)] * 30])
def test_nothing_takes_less_than_no_time(reads: list[tuple[int, float]]) -> None:
    speed = TierSpeed(0.001, 0.0001)
    for blocks, took_s in reads:
        speed.learn(blocks, took_s)
    assert speed.latency_s >= 0.0
    assert speed.block_s >= 0.0


def test_a_speed_is_measured_once_a_read_was_timed() -> None:
    speed = TierSpeed(0.002, 0.001)
    assert not speed.is_measured
    speed.learn(10, 0.5)
    assert speed.is_measured
