"""Give a trace the arrival times of `--arrivals` and `--rate`."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, get_args

import msgspec
from msgspec import structs

from baton.core.errors import ConfigError
from baton.core.validation import did_you_mean, out_of_range
from baton.lab.workload.arrivals import AllAtOnce, Arrivals, scale_arrivals
from baton.lab.workload.request import Trace
from baton.lab.workload.schedule import mean_rate_rps, redraw_arrivals, sessions_per_request

HELP = (
    "new arrival times: poisson (default with --rate), gamma,cv=X, weibull,cv=X, constant, bursty, diurnal or "
    "at-once, with the keys of docs/workloads.md; without --rate at the trace's mean rate"
)
"""Help text of `--arrivals`."""
_RATE = "rate_rps"


def _kind(process: type[Any]) -> str:
    """Return the `kind` of a process in a workload file."""
    return str(process.__struct_config__.tag)


KINDS: Mapping[str, type[Any]] = {_kind(process): process for process in get_args(Arrivals)}
"""Arrival processes by their `kind` in a workload file."""


def read_arrivals(text: str) -> Arrivals:
    """Read `KIND[,KEY=VALUE...]`, such as `gamma,cv=3`: an arrival process with its keys, except the rate.

    Return the process at one request a second; `retime` sets the rate. Raises ConfigError with every problem of the
    text, one per line.
    """
    kind, *pairs = (word.strip() for word in text.split(","))
    process = KINDS.get(kind)
    if process is None:
        raise ConfigError(f"there are no arrivals {kind!r}{did_you_mean(kind, KINDS)}; known are {', '.join(KINDS)}")
    problems: list[str] = []
    fields = [field for field in structs.fields(process) if field.name != _RATE]
    values = _values(pairs, [field.name for field in fields], problems)
    missing = [field.name for field in fields if field.required and field.name not in values]
    if missing and not problems:
        keys = ",".join(f"{key}=NUMBER" for key in missing)
        problems.append(f"{kind} arrivals need {' and '.join(missing)}: write {kind},{keys}")
    if problems:
        raise ConfigError("\n".join(problems))
    rate = {} if process is AllAtOnce else {_RATE: 1.0}
    found = msgspec.convert({"kind": kind, **rate, **values}, Arrivals)
    problems = out_of_range(found, kind)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _values(pairs: list[str], keys: list[str], problems: list[str]) -> dict[str, float]:
    """Read the `KEY=VALUE` pairs. Add the problems of bad pairs to `problems`."""
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, number = pair.partition("=")
        if key == _RATE:
            problems.append(f"{pair}: give the rate with --rate")
        elif key not in keys:
            known = f"it takes {', '.join(keys)}" if keys else "it takes no keys"
            problems.append(f"{pair}: there is no key {key!r}{did_you_mean(key, keys)}; {known}")
        elif key in values:
            problems.append(f"{pair}: {key} is given twice")
        else:
            try:
                values[key] = float(number)
            except ValueError:
                problems.append(f"{pair}: {number!r} is not a number; write {key}=NUMBER")
    return values


def rate_problems(arrivals: Arrivals, *, rated: bool) -> list[str]:
    """Return the reasons why these arrivals and `--rate` do not fit together. `rated`: `--rate` is given."""
    if rated and isinstance(arrivals, AllAtOnce):
        return ["--arrivals at-once and --rate cannot be given together: requests that arrive at once have no rate"]
    return []


def retime(trace: Trace, arrivals: Arrivals, *, rate_rps: float | None, draw: Random) -> Trace:
    """Draw new arrival times for a trace from a process at one request a second, scaled to `rate_rps`.

    `rate_rps=None` keeps the mean rate of the trace. If only session starts are drawn (`redraw_arrivals`), they are
    scaled so that requests have this rate. Raises ConfigError if no rate is given and the trace has no times.
    """
    if isinstance(arrivals, AllAtOnce):
        return redraw_arrivals(trace, arrivals, draw)
    wanted_rps = mean_rate_rps(trace) if rate_rps is None else rate_rps
    if wanted_rps is None:
        raise ConfigError(f"{missing_times_reason(trace)}, so there is no rate to keep; give --rate R")
    return redraw_arrivals(trace, scale_arrivals(arrivals, wanted_rps * sessions_per_request(trace)), draw)


def missing_times_reason(trace: Trace) -> str:
    """Return why a trace has no usable times of its own, and so no rate."""
    match trace.timing:
        case "none":
            return "the trace has no times"
        case "session":
            return "the trace counts time from the start of each session"
        case "absolute":
            return "all requests of the trace arrive at once"


def describe_arrivals(arrivals: Arrivals) -> str:
    """Describe a process without its rate: `gamma, cv 3`."""
    numbers: dict[str, float] = structs.asdict(arrivals)
    return ", ".join(
        [_kind(type(arrivals)), *(f"{name} {value:g}" for name, value in numbers.items() if name != _RATE)]
    )
