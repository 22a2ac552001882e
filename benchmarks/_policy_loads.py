"""Parts of traces and drawn requests that `_policy_cells.py` plays."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import convert
from msgspec.structs import replace

from baton.lab.workload.load import read_rows, read_trace
from baton.lab.workload.request import Trace
from baton.lab.workload.schedule import cut_trace, scale_rate, spread_arrivals
from baton.lab.workload.servegen import ArrivalRow, Statistics, read_length_row

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
Half = Literal["first", "second"]
HOUR_S: dict[Half, float] = {"first": 18_000.0, "second": 36_000.0}
"""Where the hour begins that ServeGen's requests are drawn from."""


@cache
def read_once(file: str) -> Trace:
    return read_trace(TRACES / file)


def part(file: str, rate_scale: float, spread_s: float, between: tuple[float, float], requests_max: int) -> Trace:
    """Take what lies between two shares of a trace's time."""
    trace = read_once(file)
    end_s = trace.requests[-1].at_s
    start_s, last_s = (share * end_s for share in between)
    trace = cut_trace(trace, start_s=start_s, duration_s=last_s - start_s, skip=0)
    if spread_s:
        trace = spread_arrivals(trace, spread_s)
    return scale_rate(replace(trace, requests=trace.requests[:requests_max]), rate_scale)


def drawn_of(model: str, rate_scale: float, half: Half, requests_max: int, seed: int = 0) -> Trace:
    """Requests drawn from what ServeGen counted of a model's clients in an hour, another one for each half."""
    arrivals, lengths = (TRACES / f"servegen/{model}.{what}.first80.csv.gz" for what in ("arrivals", "lengths"))
    counted = Statistics(
        arrivals=[convert(fields, ArrivalRow, strict=False) for _, fields in read_rows(arrivals)],
        lengths=[read_length_row(fields) for _, fields in read_rows(lengths)],
    )
    drawn = counted.requests(start_s=HOUR_S[half], duration_s=3600.0, rate_scale=rate_scale, seed=seed)
    return Trace(format="servegen", timing="absolute", requests=tuple(islice(drawn, requests_max)))


CONV_FILE, CODE_FILE = "azure2023/conv.first80.csv.gz", "azure2023/code.first80.csv.gz"
MOON_FILE, TOOL_FILE = "mooncake/conversation.first80.jsonl.gz", "mooncake/synthetic.first80.jsonl.gz"
