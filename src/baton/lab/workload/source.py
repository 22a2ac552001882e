"""Read the file of `--trace`: a trace, or a workload file (its name ends in .toml) that describes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

from msgspec import structs

from baton.core.errors import ConfigError
from baton.core.files import in_file
from baton.lab.workload.arrivals import scale_arrivals
from baton.lab.workload.describe import ServeGen, TraceCut, Workload, load_workload
from baton.lab.workload.formats import STATISTICS
from baton.lab.workload.generate import generate, limit_requests
from baton.lab.workload.load import PROBLEMS_MAX, read_rows, read_trace
from baton.lab.workload.request import Trace, TraceRequest
from baton.lab.workload.rows import Fields, read_row
from baton.lab.workload.schedule import cut_trace, redraw_arrivals, scale_rate, sessions_per_request, spread_arrivals
from baton.lab.workload.servegen import ArrivalRow, Statistics, read_length_row

Row = TypeVar("Row")


def read_workload(path: Path, *, seed: int, limit: int | None = None) -> Trace:
    """Read a trace, or draw the requests of a workload file with `seed`. Return at most `limit` requests.

    Raises ConfigError with every problem of the file and its line number.
    """
    if path.suffix != ".toml":
        return read_trace(path, limit=limit)
    with in_file(path, "the workload"):
        workload = load_workload(path.read_text(encoding="utf-8"))
    if workload.trace is not None:
        return _from_trace(path.parent, workload.trace, workload, seed=seed, limit=limit)
    if workload.servegen is not None:
        return _from_servegen(path.parent, workload.servegen, workload, seed=seed, limit=limit)
    return generate(workload, seed=seed, limit=limit)


def _from_trace(folder: Path, section: TraceCut, workload: Workload, *, seed: int, limit: int | None) -> Trace:
    trace = read_trace(folder / section.file, limit=_rows_needed(section, workload, limit))
    if trace.timing != "absolute" and (section.start_s or section.duration_s is not None or section.spread_s):
        raise ConfigError(f"{section.file} has no arrival times: leave out start_s, duration_s and spread_s")
    trace = cut_trace(trace, start_s=section.start_s, duration_s=section.duration_s, skip=section.skip)
    if section.spread_s:
        trace = spread_arrivals(trace, section.spread_s)
    if section.arrivals is not None and trace.requests:
        arrivals = scale_arrivals(section.arrivals, sessions_per_request(trace))
        trace = redraw_arrivals(trace, arrivals, Random(f"arrivals {seed}"))
    trace = scale_rate(trace, section.rate_scale)
    requests = tuple(limit_requests(trace.requests, workload, limit))
    if not requests:
        raise ConfigError(f"{section.file}: none of its requests is in the part that [trace] selects; widen it")
    return structs.replace(trace, requests=_with_slo(requests, workload))


def _rows_needed(section: TraceCut, workload: Workload, limit: int | None) -> int | None:
    """Return how many leading rows of the file are enough. None: all rows are needed.

    Drawn and spread times depend on all requests of the file.
    """
    counts = [bound for bound in (workload.requests, limit) if bound is not None]
    if not counts or section.start_s or section.spread_s or section.arrivals is not None:
        return None
    return section.skip + min(counts)


def _from_servegen(folder: Path, section: ServeGen, workload: Workload, *, seed: int, limit: int | None) -> Trace:
    statistics = Statistics(
        arrivals=_rows(folder / section.arrivals, lambda fields: read_row(fields, ArrivalRow), "arrivals"),
        lengths=_rows(folder / section.lengths, read_length_row, "lengths"),
    )
    drawn = statistics.requests(
        start_s=section.start_s, duration_s=section.duration_s, rate_scale=section.rate_scale, seed=seed
    )
    requests = tuple(limit_requests(drawn, workload, limit))
    if not requests:
        last_s = max(row.t_s for row in statistics.arrivals)
        raise ConfigError(
            f"{section.arrivals}: no request from {section.start_s:g} s on; its last window starts at {last_s:g} s"
        )
    return Trace(format="servegen", timing="absolute", requests=_with_slo(requests, workload))


def _with_slo(requests: tuple[TraceRequest, ...], workload: Workload) -> tuple[TraceRequest, ...]:
    if workload.slo is None:
        return requests
    slo = workload.slo_classes[workload.slo]
    return tuple(structs.replace(request, slo=slo) for request in requests)


def _rows(path: Path, read: Callable[[Fields], Row], kind: str) -> list[Row]:
    """Read every row of a file of statistics of this kind (`arrivals` or `lengths`).

    Raises ConfigError that names the wrong lines.
    """
    rows: list[Row] = []
    problems: list[str] = []
    for number, fields in read_rows(path):
        if not rows and not problems:
            _check_columns(path, frozenset(fields), kind)
        try:
            rows.append(read(fields))
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
            if len(problems) >= PROBLEMS_MAX:
                break
    if not rows and not problems:
        problems.append(f"{path}: no {kind} in it; give the file of ServeGen's statistics")
    if problems:
        raise ConfigError("\n".join(problems))
    return rows


def _check_columns(path: Path, columns: frozenset[str], kind: str) -> None:
    """Raise ConfigError if the file is of another kind: otherwise every line would repeat the same problem."""
    missing = STATISTICS[kind] - columns
    if not missing:
        return
    others = [name for name, known in STATISTICS.items() if known <= columns]
    advice = f"it has those of {others[0]}: name it there" if others else "give the file of ServeGen's statistics"
    raise ConfigError(f"{path}: no statistics of {kind}, it has no column {', '.join(sorted(missing))}; {advice}")
