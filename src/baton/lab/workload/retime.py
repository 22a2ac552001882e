"""New times of arrival for a trace: what `--arrivals` says, and at which rate."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, get_args

import msgspec
from msgspec import structs

from baton.core.errors import ConfigError
from baton.core.names import did_you_mean
from baton.lab.workload.arrivals import AllAtOnce, Arrivals, arrivals_problems, scale_arrivals
from baton.lab.workload.request import Trace
from baton.lab.workload.schedule import mean_rate_rps, redraw_arrivals, sessions_per_request

HELP = (
    "new times of arrival: poisson (default with --rate), gamma,cv=X, weibull,cv=X, constant, bursty, diurnal or "
    "at-once, with the keys of docs/workloads.md; at the trace's mean rate without --rate"
)
"""Of `--arrivals`, which several commands take."""
_RATE = "rate_rps"


def _kind(process: type[Any]) -> str:
    """The word for a process: its `kind` in a workload file."""
    return str(process.__struct_config__.tag)


KINDS: Mapping[str, type[Any]] = {_kind(process): process for process in get_args(Arrivals)}
"""Every arrival process by its `kind` in a workload file."""


def read_arrivals(text: str) -> Arrivals:
    """Read `KIND[,KEY=VALUE...]`, as in `gamma,cv=3`: an arrival process and its keys (docs/workloads.md) but the rate.

    The process that is returned has one request a second; `retime` gives it its rate. Raises ConfigError with every
    problem of the words, one per line.
    """
    kind, *pairs = (word.strip() for word in text.split(","))
    process = KINDS.get(kind)
    if process is None:
        raise ConfigError(f"there are no arrivals {kind!r}{did_you_mean(kind, KINDS)}; known are {', '.join(KINDS)}")
    problems: list[str] = []
    values = _values(pairs, _keys(process), problems)
    missing = [key for key in _needed(process) if key not in values]
    if missing and not problems:
        keys = ",".join(f"{key}=NUMBER" for key in missing)
        problems.append(f"{kind} arrivals need {' and '.join(missing)}: write {kind},{keys}")
    if problems:
        raise ConfigError("\n".join(problems))
    rate = {} if process is AllAtOnce else {_RATE: 1.0}
    found = msgspec.convert({"kind": kind, **rate, **values}, Arrivals)
    problems = arrivals_problems(kind, found)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _keys(process: type[Any]) -> list[str]:
    return [field.name for field in structs.fields(process) if field.name != _RATE]


def _needed(process: type[Any]) -> list[str]:
    return [field.name for field in structs.fields(process) if field.required and field.name != _RATE]


def _values(pairs: list[str], keys: list[str], problems: list[str]) -> dict[str, float]:
    """The numbers behind the kind; what is wrong with a pair is added to `problems`."""
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, number = pair.partition("=")
        if key == _RATE:
            problems.append(f"{pair}: the rate of arrivals is that of --rate")
        elif key not in keys:
            known = f"it takes {', '.join(keys)}" if keys else "it takes no keys"
            problems.append(f"{pair}: there is no key {key!r}{did_you_mean(key, keys)}; {known}")
        elif key in values:
            problems.append(f"{pair}: {key} is given twice")
        else:
            try:
                values[key] = float(number)
            except ValueError:
                problems.append(f"{pair}: {number!r} is no number; write {key}=NUMBER")
    return values


def rate_problems(arrivals: Arrivals, *, rated: bool) -> list[str]:
    """What is wrong with arrivals beside a `--rate`, if there is one."""
    if rated and isinstance(arrivals, AllAtOnce):
        return ["--arrivals at-once and --rate cannot be given together: those who come at once have no rate"]
    return []


def retime(trace: Trace, arrivals: Arrivals, *, rate_rps: float | None, draw: Random) -> Trace:
    """Give the requests of a trace, in their order, the times of an arrival process that has one request a second.

    `rate_rps`: requests a second; None: as many as the trace has on average. Where calls of a session keep their
    distance (`redraw_arrivals`), sessions start so often that requests have this rate. Raises ConfigError for a trace
    without times of its own: give a rate.
    """
    if isinstance(arrivals, AllAtOnce):
        return redraw_arrivals(trace, arrivals, draw)
    wanted_rps = mean_rate_rps(trace) if rate_rps is None else rate_rps
    if wanted_rps is None:
        raise ConfigError(f"{missing_times_reason(trace)}, so there is no rate to keep; give --rate R")
    return redraw_arrivals(trace, scale_arrivals(arrivals, wanted_rps * sessions_per_request(trace)), draw)


def missing_times_reason(trace: Trace) -> str:
    """Say why a trace cannot be played by its own times, or has no rate."""
    match trace.timing:
        case "none":
            return "the trace has no times"
        case "session":
            return "the trace counts time from the start of each session"
        case "absolute":
            return "the requests of the trace come all at once"


def describe_arrivals(arrivals: Arrivals) -> str:
    """A process in words, but for its rate: `gamma, cv 3`."""
    numbers: dict[str, float] = structs.asdict(arrivals)
    return ", ".join(
        [_kind(type(arrivals)), *(f"{name} {value:g}" for name, value in numbers.items() if name != _RATE)]
    )
