"""The lines of the files of batches: requests in input files, and results in output and error files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, json

from baton.core.files import open_private
from baton.serve.http.batches.store import ResultFiles
from baton.serve.http.wire.files import Problem

PROBLEMS_MAX = 100
"""Maximum problems of an input file that a batch names."""
CUSTOM_ID_CHARS_MAX = 512
"""Longest id of a request. All ids of a file are in memory while it is checked."""


class BatchLine(Struct, frozen=True, kw_only=True):
    """One request of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw
    """Not decoded, because a decoded body takes many times the memory."""


class _LineBody(Struct):
    """The field of a request's body that a batch refuses."""

    stream: Any = None


class LineResponse(Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultLine(Struct, frozen=True, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse
    error: None = None


class _Named(Struct, frozen=True):
    custom_id: str


class LineCheck:
    """Checks the lines of one input file."""

    def __init__(self, endpoint: str, lines_max: int, body_bytes_max: int) -> None:
        self._endpoint = endpoint
        self._lines_max = lines_max
        self._body_bytes_max = body_bytes_max
        self._seen: set[str] = set()

    def check(self, path: Path) -> tuple[int, tuple[Problem, ...]]:
        """Return the number of requests in the file, and its problems, at most `PROBLEMS_MAX`."""
        problems: list[Problem] = []
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if problem := self._problem(raw.strip()):
                    problems.append(Problem(code="invalid_request", message=problem, line=number))
                blank = number - len(self._seen) - len(problems)
                if max(blank, len(self._seen)) > self._lines_max:
                    what = "blank lines" if blank > self._lines_max else "requests"
                    message = f"the file has more than {self._lines_max} {what} (batches.lines_max)"
                    return 0, (Problem(code="too_many_requests", message=f"{message}; send several batches"),)
                if len(problems) >= PROBLEMS_MAX:
                    break
        if not self._seen and not problems:
            message = "the file has 0 requests; write one JSON object per line"
            problems.append(Problem(code="empty_file", message=message))
        return len(self._seen), tuple(problems)

    def _problem(self, raw: bytes) -> str:
        """Return what is wrong with a line, and add its id to those seen. Empty: it is a request, or blank."""
        if not raw:
            return ""
        try:
            line = json.decode(raw, type=BatchLine)
            stream = json.decode(line.body, type=_LineBody).stream
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"no request with custom_id, method, url and body: {error}"
        if line.method != "POST" or line.url != self._endpoint:
            return f"method and url are {line.method[:80]} {line.url[:80]}, but the batch is for POST {self._endpoint}"
        size, size_max = len(bytes(line.body)), self._body_bytes_max
        if size > size_max:
            return f"the body has {size} bytes, at most {size_max} are allowed (http.body_bytes_max)"
        if len(line.custom_id) > CUSTOM_ID_CHARS_MAX:
            return f"custom_id has {len(line.custom_id)} characters, at most {CUSTOM_ID_CHARS_MAX} are allowed"
        if stream:
            return "stream is true; a batch has no streams, leave it out"
        if line.custom_id in self._seen:
            return f"custom_id {line.custom_id!r} occurs twice; give each request its own"
        self._seen.add(line.custom_id)
        return ""


def line_at(path: Path, offset: int) -> tuple[bytes, int]:
    """Return the line of a file at an offset, without white space around it, and the offset of the next line."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.readline().strip(), file.tell()


def append_result(path: Path, result: ResultLine) -> None:
    with open_private(path, "ab") as file:
        file.write(json.encode(result) + b"\n")


def done_requests(results: ResultFiles) -> dict[str, bool]:
    """Return the ids of the requests that have results, and whether each succeeded."""
    files = ((results.output, True), (results.errors, False))
    return {name: is_done for path, is_done in files for name in _done_ids(path)}


def _done_ids(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for raw in file:
            yield json.decode(raw, type=_Named).custom_id
