"""Run the requests of batches: each through the endpoint that clients use, at the lowest priority."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct, json
from msgspec.structs import replace
from starlette.types import ASGIApp, Message

from baton.core.errors import RequestError
from baton.core.files import open_private
from baton.core.http_config import BatchesConfig
from baton.move.clock import now_s, unix_s
from baton.serve.http.batches.store import (
    OPEN_STATUSES,
    Batch,
    BatchStore,
    Counts,
    FileStore,
    Problem,
    Problems,
    StoredBatch,
)
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext, context_scope
from baton.serve.http.identity import NO_LIMITS, Identity
from baton.serve.http.wire.errors import ClusterError, error_body
from baton.serve.http.wire.schemas import SloFields

PROBLEMS_MAX = 100
"""Maximum problems of an input file that a batch names."""
SAVED_EVERY = 64
"""Finished requests after which a running batch's counts are saved. A restart counts them again from the results."""
BUSY_STATUSES = (429, 503)
"""The cluster has no place for the request now: it is sent again."""
log = logging.getLogger("baton.server")


class BatchLine(Struct, frozen=True, kw_only=True):
    """One request of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


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


@dataclass(slots=True)
class _Run:
    """A batch that runs."""

    stored: StoredBatch
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False


class BatchRunner:
    """Runs batches, each in a task. At most `batches.requests_max` requests of all batches are in the cluster."""

    def __init__(
        self,
        config: BatchesConfig,
        files: FileStore,
        batches: BatchStore,
        endpoints: Mapping[str, ASGIApp],
        budgets: Budgets,
    ) -> None:
        """`endpoints`: the endpoints that batches may use, by their paths."""
        self._config = config
        self._files = files
        self._batches = batches
        self._endpoints = endpoints
        self._budgets = budgets
        self._places = asyncio.Semaphore(config.requests_max)
        self._runs: dict[str, _Run] = {}
        self._is_closed = False

    def resume(self) -> None:
        """Go on with the batches that the end of an earlier server has interrupted."""
        for stored in reversed(self._batches.list()):
            if stored.batch.status in OPEN_STATUSES:
                self.start(stored)

    def start(self, stored: StoredBatch) -> None:
        """Run a batch. After `close`, a later server does so."""
        if self._is_closed:
            return
        run = _Run(stored, is_cancelled=stored.batch.status == "cancelling")
        self._runs[stored.batch.id] = run
        run.task = asyncio.create_task(self._play(run))
        run.task.add_done_callback(lambda task: self._ended(run, task))

    def state(self, stored: StoredBatch) -> StoredBatch:
        """Return the present state of a batch, whose counts are newer than the stored ones while it runs."""
        run = self._runs.get(stored.batch.id)
        return stored if run is None else run.stored

    def cancel(self, stored: StoredBatch) -> StoredBatch:
        """Cancel a batch: requests that run may finish. Return its new state, which is the old one if it has ended."""
        run = self._runs.get(stored.batch.id)
        if run is None:
            return stored
        if not run.is_cancelled:
            run.is_cancelled = True
            self._save(run, replace(run.stored.batch, status="cancelling", cancelling_at=unix_s()))
        return run.stored

    async def close(self) -> None:
        """Stop all batches. A later server goes on with them."""
        self._is_closed = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _save(self, run: _Run, batch: Batch) -> None:
        run.stored = replace(run.stored, batch=batch)
        self._batches.save(run.stored)

    def _ended(self, run: _Run, task: asyncio.Task[None]) -> None:
        self._runs.pop(run.stored.batch.id, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("batch %s failed", run.stored.batch.id, exc_info=error)
            message = f"the server failed on this batch: {error}; its log has the traceback"
            self._fail(run, (Problem(code="internal_error", message=message),))

    async def _play(self, run: _Run) -> None:
        """Run a batch to its end."""
        batch = run.stored.batch
        if batch.status == "finalizing":  # an earlier server ended between its last request and its end
            await asyncio.to_thread(self._finish, run)
            return
        path = self._files.content(run.stored.owner, batch.input_file_id)
        lines, problems = await asyncio.to_thread(read_lines, path, batch.endpoint, self._config.lines_max)
        if problems:
            self._fail(run, problems)
            return
        results = await asyncio.to_thread(self._batches.results, batch.id)
        done = {name: ok for file, ok in ((results.output, True), (results.errors, False)) for name in _done_ids(file)}
        counts = Counts(len(lines), sum(done.values()), len(done) - sum(done.values()))
        self._save(
            run,
            replace(
                run.stored.batch, status="cancelling" if run.is_cancelled else "in_progress", request_counts=counts
            ),
        )
        if batch.in_progress_at is None:
            self._save(run, replace(run.stored.batch, in_progress_at=unix_s()))
        left = [line for line in lines if line.custom_id not in done]
        with open_private(results.output, "ab") as output, open_private(results.errors, "ab") as errors:
            async with asyncio.TaskGroup() as group:
                for line in left:
                    await self._places.acquire()
                    task = group.create_task(self._run_line(run, line, output, errors))
                    task.add_done_callback(lambda _: self._places.release())
        await asyncio.to_thread(self._finish, run)

    async def _run_line(self, run: _Run, line: BatchLine, output: BinaryIO, errors: BinaryIO) -> None:
        """Run a request, and append its result to the output or to the errors."""
        result = await self._ask(run, line)
        if result is None:
            return
        is_done = result.response.status_code == 200
        file = output if is_done else errors
        file.write(json.encode(result) + b"\n")
        file.flush()
        self._count(run, is_done=is_done)

    def _count(self, run: _Run, *, is_done: bool) -> None:
        old = run.stored.batch.request_counts
        counts = Counts(old.total, old.completed + is_done, old.failed + (not is_done))
        run.stored = replace(run.stored, batch=replace(run.stored.batch, request_counts=counts))
        if (counts.completed + counts.failed) % SAVED_EVERY == 0:
            self._batches.save(run.stored)

    def _fail(self, run: _Run, problems: tuple[Problem, ...]) -> None:
        """End a batch that cannot go on. The client gets the results so far."""
        errors = Problems(data=problems)
        self._save(
            run,
            replace(run.stored.batch, status="failed", failed_at=unix_s(), errors=errors, **self._result_files(run)),
        )

    def _result_files(self, run: _Run) -> dict[str, str | None]:
        """Turn the results into files of the client, and return their ids."""
        owner, batch_id = run.stored.owner, run.stored.batch.id
        results = self._batches.results(batch_id)
        return {
            "output_file_id": self._files.adopt(owner, f"{batch_id}_output.jsonl", results.output),
            "error_file_id": self._files.adopt(owner, f"{batch_id}_errors.jsonl", results.errors),
        }

    def _finish(self, run: _Run) -> None:
        """End a batch whose requests have ended. A second call after a crash goes on."""
        if not run.is_cancelled:
            self._save(run, replace(run.stored.batch, status="finalizing", finalizing_at=unix_s()))
        files = self._result_files(run)
        if run.is_cancelled:
            self._save(run, replace(run.stored.batch, status="cancelled", cancelled_at=unix_s(), **files))
        else:
            self._save(run, replace(run.stored.batch, status="completed", completed_at=unix_s(), **files))

    async def _ask(self, run: _Run, line: BatchLine) -> ResultLine | None:
        """Send a request until the cluster has a place for it. None: the batch was cancelled meanwhile."""
        batch = run.stored.batch
        raw = json.encode(line.body)
        request_id = f"{batch.id}-{line.custom_id}"[:128]
        while not run.is_cancelled:
            status, body, wait_s = await self._call(run.stored, batch.endpoint, request_id, raw)
            if status not in BUSY_STATUSES:
                response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))
                return ResultLine(id=f"batch_req_{request_id}", custom_id=line.custom_id, response=response)
            await asyncio.sleep(wait_s)
        return None

    async def _call(self, stored: StoredBatch, path: str, request_id: str, raw: bytes) -> tuple[int, bytes, float]:
        """Send a request to an endpoint. Return the status, the body, and the seconds to wait before the next try."""
        identity = Identity(
            key=stored.key,
            tenant=stored.tenant,
            scopes=frozenset({"generate"}),
            cache_namespace=stored.cache_namespace,
        )
        arrived_at_s = now_s()
        budget = self._budgets.begin(f"batch {stored.key}", NO_LIMITS, is_counted=False, now_s=arrived_at_s)
        context = RequestContext(
            request_id,
            arrived_at_s,
            identity,
            stored.key,
            budget,
            SloFields(),
            path,
            {b"content-type": b"application/json"},
            is_offline=True,
        )
        exchange = _Exchange(raw)
        try:
            await self._endpoints[path](context_scope(context), exchange.receive, exchange.send)
        except ClusterError as error:
            return error.status, error_body(error), error.retry_after_s or 1.0
        except RequestError as error:
            return error.status, error_body(error), 1.0
        finally:
            budget.end()
        return exchange.status, b"".join(exchange.body), 1.0


class _Exchange:
    """The client's side of a request to an endpoint."""

    def __init__(self, raw: bytes) -> None:
        self._raw: bytes | None = raw
        self.status = 0
        self.body: list[bytes] = []

    async def receive(self) -> Message:
        raw, self._raw = self._raw, None
        if raw is None:
            await asyncio.Event().wait()  # the client never disconnects; a cancelled task ends the request
        return {"type": "http.request", "body": raw or b"", "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body.append(message.get("body", b""))


def read_lines(path: Path, endpoint: str, lines_max: int) -> tuple[list[BatchLine], tuple[Problem, ...]]:
    """Return the requests of an input file, and its problems, at most `PROBLEMS_MAX`."""
    lines: list[BatchLine] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        if not raw.strip():
            continue
        found = _line(raw, endpoint, seen)
        if isinstance(found, BatchLine):
            seen.add(found.custom_id)
            lines.append(found)
        else:
            problems.append(Problem(code="invalid_request", message=found, line=number))
        if len(lines) > lines_max:
            message = f"the file has more than {lines_max} requests (batches.lines_max); send several batches"
            return [], (Problem(code="too_many_requests", message=message),)
        if len(problems) >= PROBLEMS_MAX:
            break
    if not lines and not problems:
        problems.append(Problem(code="empty_file", message="the file has 0 requests; write one JSON object per line"))
    return lines, tuple(problems)


def _line(raw: bytes, endpoint: str, seen: set[str]) -> BatchLine | str:
    """Return the request of a line, or what is wrong with it."""
    try:
        line = json.decode(raw, type=BatchLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"no request with custom_id, method, url and body: {error}"
    if line.method != "POST" or line.url != endpoint:
        return f"method and url are {line.method} {line.url}, but the batch is for POST {endpoint}"
    if line.body.get("stream"):
        return "stream is true; a batch has no streams, leave it out"
    if line.custom_id in seen:
        return f"custom_id {line.custom_id[:80]!r} occurs twice; give each request its own"
    return line


def _done_ids(path: Path) -> Iterator[str]:
    """Yield the ids of the requests whose results a file has."""
    with path.open("rb") as file:
        for raw in file:
            yield json.decode(raw, type=_Named).custom_id


class _Named(Struct, frozen=True):
    custom_id: str
