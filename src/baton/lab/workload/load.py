"""Read a trace file: plain or gzip, JSON lines or CSV, detected from its content."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.lab.workload.formats import FORMATS, STATISTICS, Reader, TraceFormat, find_format, nearest_format
from baton.lab.workload.request import Timing, Trace, TraceRequest
from baton.lab.workload.rows import Fields

PROBLEMS_MAX = 10
"""Bad lines that one error message lists."""
_GZIP_MAGIC = b"\x1f\x8b"


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read at most `limit` requests. Absolute times are shifted so that the first request arrives at 0.

    Raises ConfigError with the numbers of the bad lines: correct the file, or lower `limit` to stop before them.
    """
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: no requests in it; a trace has one JSON object a line, or a CSV header and rows")
    found = _detect(path, frozenset(first[1]))
    reading = _Reading(path=path, timing=found.timing, read=found.reader(), limit=limit)
    reading.take(*first)
    try:
        while not reading.is_over and (row := next(rows, None)) is not None:
            reading.take(*row)
    except ConfigError as error:
        reading.refuse(str(error))
    if reading.problems:
        raise ConfigError("\n".join(reading.messages()))
    return Trace(format=found.name, timing=found.timing, requests=tuple(_from_zero(reading.requests, found.timing)))


@dataclass(slots=True, kw_only=True)
class _Reading:
    """The state of reading a file: its requests, problems and latest times."""

    path: Path
    timing: Timing
    read: Reader
    limit: int | None
    requests: list[TraceRequest] = field(default_factory=list[TraceRequest])
    problems: list[str] = field(default_factory=list[str])
    good: int = 0
    """Requests before the first problem."""
    last: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """Line and time of the latest row: of the file (key ""), or of each session if its times count from its start."""

    @property
    def is_over(self) -> bool:
        """Whether the limit of requests or of problems is reached."""
        enough = self.limit is not None and len(self.requests) >= self.limit
        return enough or len(self.problems) >= PROBLEMS_MAX

    def take(self, number: int, fields: Fields) -> None:
        """Add the request of one row, or its problem."""
        try:
            request = self.read(fields)
            self._check_time(number, request)
        except ValueError as error:
            self.refuse(f"{self.path}, line {number}: {error}")
            return
        self.requests.append(request)

    def refuse(self, problem: str) -> None:
        if not self.problems:
            self.good = len(self.requests)
        self.problems.append(problem)

    def messages(self) -> list[str]:
        """Return all problems, and how to use the part of the file before them."""
        if not self.good:
            return self.problems
        usable = f"--limit {self.good} of baton sim and baton bench plays the requests before the first problem"
        return [*self.problems, f"{self.path}: {usable}"]

    def _check_time(self, number: int, request: TraceRequest) -> None:
        if not math.isfinite(request.at_s):
            raise ValueError(f"time {request.at_s} is not a finite number")
        clock = request.session if self.timing == "session" else ""
        line, at_s = self.last.get(clock, (0, 0.0))
        if line and request.at_s < at_s:
            later = f"time {_seconds(request.at_s)} s is before the {_seconds(at_s)} s of line {line}"
            raise ValueError(f"{later}; sort the file by time")
        self.last[clock] = (number, request.at_s)


def _seconds(value: float) -> str:
    # Six decimals, because adjacent wall-clock times differ in their last digits only.
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _detect(path: Path, columns: frozenset[str]) -> TraceFormat:
    found = find_format(columns)
    if found is not None:
        return found
    if any(known <= columns for known in STATISTICS.values()):
        raise ConfigError(
            f"{path}: these are ServeGen's statistics of clients, not requests; name both files in the [servegen] "
            "section of a workload file (docs/workloads.md) and give that"
        )
    nearest = nearest_format(columns)
    lacks = (
        f" {nearest.name} needs {', '.join(sorted(nearest.columns.keys() - columns))} too."
        if nearest is not None
        else ""
    )
    known = "; ".join(f"{known.name}: {', '.join(sorted(known.columns))}" for known in FORMATS)
    shown = ", ".join(sorted(columns))
    raise ConfigError(f"{path}: no known trace format has the columns {shown}.{lacks} Known are {known}")


def _from_zero(requests: list[TraceRequest], timing: Timing) -> list[TraceRequest]:
    if timing != "absolute" or not requests or not requests[0].at_s:
        return requests
    start_s = requests[0].at_s
    return [msgspec.structs.replace(request, at_s=round(request.at_s - start_s, 6)) for request in requests]


def read_rows(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield (line number, fields) of every row. Line 1 is the first line of the file; a CSV header counts."""
    header: list[str] | None = None
    for number, line in _lines(path):
        try:
            if line.lstrip().startswith("{"):
                yield number, msgspec.json.decode(line, type=dict[str, object])
            elif header is None and line.lstrip().startswith("["):
                raise ConfigError(f"{path}: one JSON list; write one object a line: jq -c '.[]' FILE")
            elif header is None:
                header = next(csv.reader([line]))
            else:
                yield number, _csv_fields(header, line)
        except (msgspec.DecodeError, csv.Error, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; is the file cut off?") from error


def _csv_fields(header: list[str], line: str) -> Fields:
    values = next(csv.reader([line])) if '"' in line else line.split(",")
    if len(values) != len(header):
        raise ValueError(f"{len(values)} fields where the header names {len(header)}")
    return dict(zip(header, values, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without line ends. Raises ConfigError for an empty line between two others."""
    number, empty, begun = 0, 0, False
    try:
        with path.open("rb") as probe:
            zipped = probe.read(2) == _GZIP_MAGIC
        encoding = "utf-8-sig"  # some programs write a byte order mark
        with gzip.open(path, "rt", encoding=encoding) if zipped else path.open(encoding=encoding) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    empty = empty or (number if begun else 0)
                elif empty:
                    raise ConfigError(f"{path}, line {empty}: an empty line between requests; delete it")
                else:
                    begun = True
                    yield number, line.rstrip("\r\n")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}: cut off or damaged after line {number}: {error}; copy it again") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text after line {number}; is it a trace?") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the trace: {error.strerror}") from error
