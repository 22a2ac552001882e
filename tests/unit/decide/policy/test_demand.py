"""From load to workers: forecasts, roles and scaling, on loads whose answer was computed by hand (`views.COST`)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.core.errors import ConfigError
from baton.core.report_parts import StepPrices
from baton.core.types import ROLES, LoadWindow, Role
from baton.decide.policy.demand import ForecastScaling, largest_batch, workers_needed
from baton.decide.policy.demand_roles import DemandRoles
from baton.decide.policy.forecast import DAY_S, LoadRates, RecentDemand, TimeOfDay, load_rates
from baton.decide.policy.forecast_series import Arima, ExponentialSmoothing, binned_rps
from tests.unit.decide.policy.views import COST, cluster, worker


def window(
    end_s: float, *, arrived: int, window_s: float = 1.0, prompt_tokens: int = 100, output_tokens: int = 50
) -> LoadWindow:
    return LoadWindow(
        end_s=end_s,
        window_s=window_s,
        arrived_requests=arrived,
        arrived_tokens=arrived * prompt_tokens,
        finished_requests=arrived,
        output_tokens=arrived * output_tokens,
    )


def test_recent_demand_is_what_came_in_the_last_while() -> None:
    history = [window(float(second), arrived=100 if second < 70 else 4) for second in range(1, 101)]
    assert RecentDemand(span_s=30.0).ahead(history, 60.0) == LoadRates(
        requests_rps=4.0, prompt_tokens=100.0, output_tokens=50.0
    )
    assert load_rates([]) == LoadRates()


def test_the_time_of_day_is_known_from_the_day_before_and_scaled_by_this_day() -> None:
    """Yesterday 10/s at noon and 40/s an hour later; today 20/s at noon: 80/s are expected an hour from now."""
    hour_s, noon_s = 3600.0, DAY_S / 2
    day = [
        window(noon_s + place * 300.0, arrived=round(rate * 300), window_s=300.0)
        for place, rate in enumerate([10] * 7 + [40] * 7)
    ]
    quiet = [window(noon_s + 5 * hour_s, arrived=0, window_s=300.0)]
    today = [window(DAY_S + noon_s + place * 300.0, arrived=20 * 300, window_s=300.0) for place in range(-3, 1)]
    expected = TimeOfDay().ahead([*day, *quiet, *today], hour_s)
    assert expected.requests_rps == pytest.approx(80.0, rel=0.01)
    assert TimeOfDay().ahead(today, hour_s).requests_rps == pytest.approx(20.0), "no day before: what came last"


def test_a_few_requests_in_a_quiet_night_do_not_scale_the_day() -> None:
    """Yesterday one request at four, 20/s an hour later. Today none came at four: 20/s are expected all the same."""
    yesterday = [window(place * 300.0, arrived=1 if place == 48 else 0, window_s=300.0) for place in range(1, 58)]
    yesterday += [window(place * 300.0, arrived=6000, window_s=300.0) for place in range(58, 65)]
    today = [window(DAY_S + place * 300.0, arrived=0, window_s=300.0) for place in range(40, 49)]
    assert TimeOfDay().ahead([*yesterday, *today], 3600.0).requests_rps == pytest.approx(20.0, rel=0.06)


def test_old_windows_that_lie_half_in_the_time_of_day_count_half() -> None:
    """Yesterday's windows are an hour long, and the rate doubles at one. Today is as yesterday, ten minutes before."""
    rates = {1: 10, 2: 20, 3: 20}
    yesterday = [window(hour * 3600.0, arrived=rate * 3600, window_s=3600.0) for hour, rate in rates.items()]
    today = [window(DAY_S + minute * 60.0, arrived=600, window_s=60.0) for minute in range(1, 51)]
    ahead = TimeOfDay(span_s=1800.0)
    assert ahead.ahead([*yesterday, *today], 600.0).requests_rps == pytest.approx(15.0, rel=0.01)


def test_bins_are_full_and_end_with_the_history() -> None:
    history = [window(float(second), arrived=second) for second in range(1, 11)]
    assert binned_rps(history, 4.0, 240) == [(3 + 4 + 5 + 6) / 4, (7 + 8 + 9 + 10) / 4]


@pytest.mark.parametrize("kind", [Arima, ExponentialSmoothing], ids=["arima", "ets"])
def test_a_series_that_rises_is_forecast_to_go_on_rising(kind: type[Arima] | type[ExponentialSmoothing]) -> None:
    pytest.importorskip("statsmodels", reason="no package statsmodels: pip install 'baton[forecast]'")
    forecast = kind(bin_s=10.0)
    history = [window(float(second), arrived=5 + second // 20) for second in range(1, 401)]
    recent = RecentDemand(span_s=10.0).ahead(history, 0.0).requests_rps
    ahead = forecast.ahead(history, 60.0).requests_rps
    assert recent + 1.0 < ahead < recent + 6.0
    assert forecast.ahead(history[:50], 60.0).requests_rps == pytest.approx(history[49].arrived_requests, abs=1.0)


@pytest.mark.parametrize("kind", [Arima, ExponentialSmoothing], ids=["arima", "ets"])
def test_a_series_is_fitted_again_when_it_has_a_new_point(kind: type[Arima] | type[ExponentialSmoothing]) -> None:
    """A fit takes long, and a server asks every second: within a point the answer stays."""
    pytest.importorskip("statsmodels", reason="no package statsmodels: pip install 'baton[forecast]'")
    forecast = kind(bin_s=10.0)
    history = [window(float(second), arrived=5 + second // 20) for second in range(1, 421)]
    first, later, next_point = (forecast.ahead(history[:end], 60.0).requests_rps for end in (400, 409, 410))
    assert first == later != next_point
    assert kind(bin_s=10.0).ahead(history[:409], 60.0).requests_rps != first, "a fresh one fits what it sees"


def test_workers_are_needed_as_the_cost_model_says() -> None:
    """10 prompts a second of 90 + 10 ms: 1 worker. A step of 40 requests takes 50 ms: 10 * 100 * 0.05 / 40 workers."""
    demand = LoadRates(requests_rps=10.0, prompt_tokens=90.0, output_tokens=100.0)
    p, d = worker("p"), worker("d", "decode")
    work = workers_needed(demand, p, d, COST, 0.05)
    assert work.prefill == pytest.approx(1.0)
    assert work.decode == pytest.approx(10 * 100 * 0.05 / 40)
    assert workers_needed(LoadRates(), p, d, COST, 0.05).prefill == 0


def test_cached_prompt_tokens_need_no_worker() -> None:
    """Before, a chat whose turns share nine tenths of their prompt counted in full."""
    chat = [
        LoadWindow(
            end_s=1.0, window_s=1.0, arrived_requests=10, arrived_tokens=10_000, begun_requests=5, cached_tokens=4500
        )
    ]
    demand = load_rates(chat)
    assert demand.cached_tokens == 900.0
    assert workers_needed(demand, worker("p"), worker("d", "decode"), COST, 0.05).prefill == pytest.approx(1.1)


def test_each_phase_is_priced_by_its_own_worker() -> None:
    """The prefill worker has learned that it is half as fast as the cost model says."""
    slow = replace(worker("p"), prices=StepPrices(2.0, (1.0,) * 5, 0.0, 9))
    demand = LoadRates(requests_rps=10.0, prompt_tokens=90.0, output_tokens=100.0)
    work = workers_needed(demand, slow, worker("d", "decode"), COST, 0.05)
    assert work.prefill == pytest.approx(2.0)
    assert work.decode == pytest.approx(10 * 100 * 0.05 / 40)


def test_the_largest_batch_is_bounded_by_time_memory_and_the_workers_own_limit() -> None:
    assert largest_batch(worker("d"), 100, step_s_max=0.05, model=COST) == 40
    assert largest_batch(worker("d", kv_tokens_max=1000), 100, step_s_max=0.05, model=COST) == 10
    assert largest_batch(worker("d"), 100, step_s_max=0.001, model=COST) == 1


def test_scaling_asks_for_what_the_demand_needs_and_retires_one_at_a_time_after_a_calm() -> None:
    """Prompts of 0.5 s, 3 a second, at most 75 % busy: 2 workers. One mixed worker is there."""
    busy = [window(float(second), arrived=3, prompt_tokens=490, output_tokens=1) for second in range(1, 31)]
    scaling = ForecastScaling(calm_s=60.0)
    view = cluster(worker("p0"), worker("d0", "decode"))
    assert scaling.target(view, busy, COST, 30.0) == {"prefill": 2, "decode": 1}
    calm = [window(1000.0 + second, arrived=0) for second in range(1, 31)]
    many = cluster(worker("p0"), worker("p1"), worker("p2"), worker("d0", "decode"))
    assert scaling.target(many, calm, COST, 1000.0) == {"prefill": 3, "decode": 1}
    assert scaling.target(many, calm, COST, 1059.0)["prefill"] == 3
    assert scaling.target(many, calm, COST, 1060.0)["prefill"] == 2
    assert scaling.target(many, calm, COST, 1061.0)["prefill"] == 3, "the next one after another calm"


def test_a_mixed_worker_beside_phase_workers_does_not_count_the_load_again() -> None:
    """Prompts of 0.5 s, 4 a second, with 200 output tokens. A mixed worker decodes in place of a missing decode one."""
    busy = [window(float(second), arrived=4, prompt_tokens=490, output_tokens=200) for second in range(1, 31)]

    def target(prefill: int, decode: int, mixed: int) -> dict[Role, int]:
        counts: dict[Role, int] = {"prefill": prefill, "decode": decode, "mixed": mixed}
        view = cluster(*(worker(f"{role}{place}", role) for role in ROLES for place in range(counts[role])))
        scaling = ForecastScaling(calm_s=60.0)
        scaling.target(view, busy, COST, 30.0)
        return dict(scaling.target(view, busy, COST, 90.0))

    assert sum(target(5, 0, 1).values()) <= sum(target(5, 1, 0).values()) + 1
    assert target(5, 1, 5)["mixed"] == 4, "both phases have workers of their own: the mixed ones end one by one"


def test_a_forecast_is_a_plugin_with_options_and_refused_at_once_when_it_is_none() -> None:
    made = ForecastScaling(forecast="recent-demand", forecast_options={"span_s": 5.0})
    roles: tuple[Role, ...] = ROLES
    assert set(made.target(cluster(worker("m", "mixed")), [window(1.0, arrived=1)], COST, 1.0)) <= set(roles)
    with pytest.raises(ConfigError, match="recent-mean is no ForecastPolicy: it lacks ahead"):
        DemandRoles(forecast="recent-mean")
