"""The history of load: days of it, with a bound, and no request in it twice."""

from __future__ import annotations

import pytest

from baton.core.types import LoadWindow
from baton.decide.control.load_history import COARSE_S, COARSE_WINDOWS_MAX, FINE_WINDOWS_MAX, LoadHistory, joined
from baton.decide.policy.forecast import DAY_S
from baton.decide.policy.forecast_series import binned_rps


def ticked(ticks: int, tick_s: float = 1.0) -> LoadHistory:
    """A history with one request, of as many tokens as its tick has a number, in every tick."""
    history = LoadHistory()
    for tick in range(1, ticks + 1):
        history.append(
            LoadWindow(
                end_s=tick * tick_s, window_s=tick_s, arrived_requests=1, arrived_tokens=tick, finished_requests=1
            )
        )
    return history


def test_old_windows_are_put_together_to_minutes_and_nothing_is_lost_or_counted_twice() -> None:
    ticks = FINE_WINDOWS_MAX + 610
    history = ticked(ticks)
    assert [window.window_s for window in list(history)[:11]] == [COARSE_S] * 10 + [10.0]
    assert len(history) == 11 + FINE_WINDOWS_MAX
    assert sum(window.arrived_tokens for window in history) == ticks * (ticks + 1) // 2
    ends_s = [window.end_s for window in history]
    starts_s = [window.end_s - window.window_s for window in history]
    assert starts_s == [0.0, *ends_s[:-1]], "no gap, no overlap"


def test_it_is_a_sequence_from_either_end_and_across_the_seam() -> None:
    history = ticked(FINE_WINDOWS_MAX + 120)
    plain = list(history)
    assert [history[place] for place in range(len(history))] == plain
    assert [history[-place] for place in range(1, len(history) + 1)] == plain[::-1] == list(reversed(history))
    assert (history[1:5], history[-3:]) == (plain[1:5], plain[-3:])
    for beyond in (len(history), -len(history) - 1):
        with pytest.raises(IndexError, match="of 4098"):
            history[beyond]


@pytest.mark.parametrize("tick_s", [5.0, 20.0, 300.0])
def test_it_reaches_a_week_back_and_no_further_than_its_bound(tick_s: float) -> None:
    week = ticked(int(8.5 * DAY_S / tick_s), tick_s)
    assert week[-1].end_s - week[0].end_s > 7 * DAY_S
    assert len(ticked(COARSE_WINDOWS_MAX + FINE_WINDOWS_MAX + 5, 300.0)) == COARSE_WINDOWS_MAX + FINE_WINDOWS_MAX


def test_merged_windows_have_mean_latencies_and_the_tightest_slos() -> None:
    early = LoadWindow(end_s=1.0, window_s=1.0, prefilled_requests=1, ttft_s=4.0, finished_requests=3, tpot_s=0.5)
    late = LoadWindow(end_s=2.0, window_s=1.0, prefilled_requests=3, ttft_s=2.0, slo_ttft_s=2.0, slo_tpot_s=0.1)
    both = joined(early, late)
    assert (both.end_s, both.window_s, both.prefilled_requests, both.ttft_s) == (2.0, 2.0, 4, 2.5)
    assert (both.finished_requests, both.tpot_s, both.slo_ttft_s, both.slo_tpot_s) == (3, 0.5, 2.0, 0.1)
    tighter = joined(both, LoadWindow(end_s=3.0, window_s=1.0, slo_ttft_s=1.0, slo_tpot_s=0.3))
    assert (tighter.slo_ttft_s, tighter.slo_tpot_s) == (1.0, 0.1)


def test_answers_of_one_token_have_no_part_in_the_mean_time_between_tokens() -> None:
    """Nine of them finished, and have no TPOT: the other answer's is not a tenth of what it was."""
    short = LoadWindow(end_s=1.0, window_s=1.0, finished_requests=9)
    long = LoadWindow(end_s=2.0, window_s=1.0, finished_requests=1, tpot_s=0.5)
    assert [joined(short, long).tpot_s, joined(long, short).tpot_s] == [0.5, 0.5]
    assert joined(short, short).tpot_s == 0.0


def test_a_series_gets_all_the_points_that_it_asks_for_at_the_default_tick() -> None:
    """240 points of a minute are four hours; across the seam they are as even as what came."""
    rates = binned_rps(ticked(5 * 3600), 60.0, 240)
    assert rates == pytest.approx([1.0] * 240)
    assert binned_rps(ticked(2 * 3600), 10.0, 720) == pytest.approx([1.0] * 720), "bins shorter than old windows"
