"""Requests drawn from statistics have these statistics."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from baton.core.errors import ConfigError
from baton.lab.workload.request import TraceRequest
from baton.lab.workload.servegen import ArrivalRow, window_times_s
from baton.lab.workload.source import read_workload

PERCENTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
ARRIVALS = """client,t_s,rate_rps,cv,pattern,param1,param2
7,0,2.0,0.5,Gamma,4.0,0.125
7,600,1.0,3.0,Weibull,0.43,0.36
9,600,0.5,1.0,Gamma,1.0,0.5
"""


def lengths(*clients: str) -> str:
    header = ["client", "t_s", *(f"{which}_{name}" for which in ("in", "out") for name in columns())]
    rows = [",".join([client, "0", "0", *map(str, values(50)), "0", *map(str, values(10))]) for client in clients]
    return "\n".join([",".join(header), *rows]) + "\n"


def columns() -> list[str]:
    return ["mean", *(f"p{percentile}" for percentile in PERCENTILES)]


def values(least: int) -> list[int]:
    return [least + percentile * least for percentile in PERCENTILES]


def write(folder: Path, arrivals: str, known: str, extra: str = "") -> Path:
    (folder / "arrivals.csv").write_text(arrivals)
    (folder / "lengths.csv").write_text(known)
    path = folder / "workload.toml"
    path.write_text(f'[servegen]\narrivals = "arrivals.csv"\nlengths = "lengths.csv"\n{extra}\n')
    return path


def test_every_window_of_a_client_has_its_requests_and_their_lengths(tmp_path: Path) -> None:
    requests = read_workload(write(tmp_path, ARRIVALS, lengths("7", "9")), seed=4).requests
    counts = [count(requests, "7", 0), count(requests, "7", 600), count(requests, "9", 600)]
    assert counts == [1200, 600, 300]
    assert len(requests) == 2100
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    middle = sorted(request.input_tokens for request in requests)[1050]
    assert middle == pytest.approx(2550, rel=0.05)  # the 50th percentile: 50 + 50 * 50
    assert all(50 <= request.input_tokens <= 5050 and 10 <= request.output_tokens <= 1010 for request in requests)


def count(requests: tuple[TraceRequest, ...], client: str, begin_s: float) -> int:
    return sum(request.tenant == client and begin_s <= request.at_s < begin_s + 600 for request in requests)


def test_gaps_vary_as_measured_and_lie_in_the_active_part() -> None:
    """2,400 gaps of a mean of 0.1 s: 240 s of the window, with nothing in the rest."""
    row = ArrivalRow(client="a", t_s=600.0, rate_rps=4.0, cv=2.0, pattern="Gamma", param1=0.25, param2=0.4)
    times_s = window_times_s(row, 1.0, Random(0))
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert row.active_s == pytest.approx(240.0)
    assert len(times_s) == 2400
    assert 600 <= times_s[0] <= times_s[-1] <= 1200
    assert times_s[-1] - times_s[0] == pytest.approx(240.0, rel=0.02)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(2.0, rel=0.1)


def test_an_active_part_is_no_longer_than_its_window() -> None:
    """The fit of a heavy tail may claim more: 1,200 gaps of 2 s in 600 s."""
    row = ArrivalRow(client="a", t_s=600.0, rate_rps=2.0, cv=1.0, pattern="Gamma", param1=1.0, param2=2.0)
    times_s = window_times_s(row, 1.0, Random(0))
    assert row.active_s == 600.0
    assert 600 <= times_s[0] <= times_s[-1] < 1200


def test_a_rate_scale_keeps_the_bursts(tmp_path: Path) -> None:
    path = write(tmp_path, ARRIVALS, lengths("7"), "rate_scale = 0.25")
    requests = read_workload(path, seed=1).requests
    assert [count(requests, "7", 0), count(requests, "7", 600), count(requests, "9", 600)] == [300, 150, 75]


def test_a_part_of_the_statistics_begins_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path, ARRIVALS, lengths("7"), "start_s = 600\nduration_s = 300")
    requests = read_workload(path, seed=1).requests
    assert {request.tenant for request in requests} == {"7", "9"}
    assert requests[0].at_s >= 0
    assert requests[-1].at_s < 300


def test_a_burst_too_dense_for_floats_is_one_instant() -> None:
    row = ArrivalRow(client="a", t_s=0.0, rate_rps=1.0, cv=1000.0, pattern="Gamma", param1=1e-6, param2=1.0)
    assert len(window_times_s(row, 1.0, Random(0))) == 600


BAD = {
    "rate": (ARRIVALS.replace("2.0,0.5", "-2.0,0.5"), lengths("7"), r"arrivals.csv, line 2: .*rate_rps"),
    "pattern": (ARRIVALS.replace("Weibull", "Pareto"), lengths("7"), r"arrivals.csv, line 3: .*Pareto"),
    "no column": (ARRIVALS, lengths("7").replace("in_p50", "in_median"), r"lengths.csv, line 2: no column in_p50"),
    "percentiles fall": (ARRIVALS, lengths("7").replace(",5050,", ",4,"), r"lengths.csv, line 2: in: .*must not fall"),
    "the other file": (
        lengths("7"),
        ARRIVALS,
        r"no statistics of arrivals, it has no column cv, rate_rps; it has those of lengths",
    ),
    "a trace": (ARRIVALS, "a,b\n1,2\n", r"no statistics of lengths, .*; give the file of ServeGen's statistics"),
    "cut off": (ARRIVALS + "9,1200", lengths("7"), r"line 5: 2 fields where the header names 7"),
    "empty": (ARRIVALS, "", "no lengths in it"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_statistics_are_refused_with_the_line(case: str, tmp_path: Path) -> None:
    arrivals, known, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        read_workload(write(tmp_path, arrivals, known), seed=0)


def test_a_part_beyond_the_statistics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no request from 9000 s on; its last window starts at 600 s"):
        read_workload(write(tmp_path, ARRIVALS, lengths("7"), "start_s = 9000"), seed=0)
