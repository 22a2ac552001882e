"""Run the requests of batches: each through the endpoint that clients use, at the lowest priority."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import json
from msgspec.structs import replace
from starlette.types import ASGIApp, Message

from baton.core.errors import RequestError
from baton.core.http_config import BatchesConfig
from baton.move.clock import now_s, unix_s
from baton.serve.http.batches.lines import (
    BatchLine,
    LineCheck,
    LineResponse,
    ResultLine,
    append_result,
    done_requests,
    line_at,
)
from baton.serve.http.batches.store import (
    OPEN_STATUSES,
    BatchStore,
    FileStore,
    ResultFiles,
    StoredBatch,
)
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import RequestContext, context_scope
from baton.serve.http.identity import NO_LIMITS, Identity
from baton.serve.http.wire.errors import ClusterError, error_body
from baton.serve.http.wire.files import Batch, Counts, Problem, Problems, Status
from baton.serve.http.wire.schemas import SloFields

SAVED_EVERY = 64
"""Finished requests after which a running batch's counts are saved. A restart counts them again from the results."""
BUSY_STATUSES = (429, 503)
"""The cluster has no place for the request now: it is sent again."""
log = logging.getLogger("baton.server")


@dataclass(slots=True)
class _Run:
    """A batch that runs."""

    stored: StoredBatch
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the state is written, so that the newest one is written last."""


class BatchRunner:
    """Runs batches, each in a task. At most `batches.requests_max` requests of all batches are in the cluster.

    A waiting batch holds no request in memory and no file open, since clients may start a thousand of them. One whose
    requests the cluster rejects for now does not hold up the others.
    """

    def __init__(
        self,
        config: BatchesConfig,
        files: FileStore,
        batches: BatchStore,
        endpoints: Mapping[str, ASGIApp],
        budgets: Budgets,
        body_bytes_max: int,
    ) -> None:
        """`endpoints`: the endpoints that batches may use, by their paths. `body_bytes_max`: size of one request."""
        self._config = config
        self._files = files
        self._batches = batches
        self._endpoints = endpoints
        self._budgets = budgets
        self._body_bytes_max = body_bytes_max
        self._places = asyncio.Semaphore(config.requests_max)
        self._checking = asyncio.Semaphore(1)
        """Lets one input file at a time be checked, because its request ids are in memory meanwhile."""
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

    async def cancel(self, stored: StoredBatch) -> StoredBatch:
        """Cancel a batch: requests that run may finish. Return its new state, which is the old one if it has ended."""
        run = self._runs.get(stored.batch.id)
        if run is None:
            return stored
        if not run.is_cancelled and run.stored.batch.status in OPEN_STATUSES:
            run.is_cancelled = True
            await self._save(run, replace(run.stored.batch, status="cancelling", cancelling_at=unix_s()))
        return run.stored

    async def close(self) -> None:
        """Stop all batches. A later server goes on with them."""
        self._is_closed = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _save(self, run: _Run, batch: Batch) -> None:
        run.stored = replace(run.stored, batch=batch)
        async with run.saving:
            await asyncio.to_thread(self._batches.save, run.stored)

    def _ended(self, run: _Run, task: asyncio.Task[None]) -> None:
        """Forget a batch that has ended. Only this batch fails if an unexpected exception has ended it."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            del self._runs[run.stored.batch.id]
            return
        log.error("batch %s failed", run.stored.batch.id, exc_info=error)
        message = f"the server failed on this batch: {error}; its log has the traceback"
        run.task = asyncio.create_task(self._fail(run, (Problem(code="internal_error", message=message),)))
        run.task.add_done_callback(lambda _: self._runs.pop(run.stored.batch.id))

    async def _play(self, run: _Run) -> None:
        """Run a batch to its end."""
        batch = run.stored.batch
        if batch.status == "finalizing":  # an earlier server ended between its last request and its end
            await self._finish(run)
            return
        try:
            path = self._files.content(run.stored.owner, batch.input_file_id)
        except RequestError as error:  # the client deleted it while it made the batch
            await self._fail(run, (Problem(code=error.code or "", message=str(error)),))
            return
        async with self._checking:
            total, problems = await asyncio.to_thread(self._line_check(batch).check, path)
        if problems:
            await self._fail(run, problems)
            return
        results = await asyncio.to_thread(self._batches.results, batch.id)
        done = await asyncio.to_thread(done_requests, results)
        counts = Counts(total, sum(done.values()), len(done) - sum(done.values()))
        status: Status = "cancelling" if run.is_cancelled else "in_progress"
        began_at = batch.in_progress_at or unix_s()
        await self._save(run, replace(run.stored.batch, status=status, request_counts=counts, in_progress_at=began_at))
        offset, size_bytes, own = 0, path.stat().st_size, asyncio.Semaphore(self._config.requests_max)
        try:
            async with asyncio.TaskGroup() as group:
                while offset < size_bytes and not run.is_cancelled:
                    async with _Place(own, self._places) as place:
                        start = offset
                        raw, offset = await asyncio.to_thread(line_at, path, start)
                        if raw and json.decode(raw, type=BatchLine).custom_id not in done:
                            place.keep_until_done(group.create_task(self._run_line(run, path, start, results, place)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await self._finish(run)

    def _line_check(self, batch: Batch) -> LineCheck:
        return LineCheck(batch.endpoint, self._config.lines_max, self._body_bytes_max)

    async def _run_line(self, run: _Run, path: Path, offset: int, results: ResultFiles, place: _Place) -> None:
        """Run the request at an offset of the input file, and append its result to the output or to the errors."""
        result = await self._ask(run, path, offset, place)
        if result is None:
            return
        is_done = result.response.status_code == 200
        await asyncio.to_thread(append_result, results.output if is_done else results.errors, result)
        old = run.stored.batch.request_counts
        counts = Counts(old.total, old.completed + is_done, old.failed + (not is_done))
        counted = replace(run.stored.batch, request_counts=counts)
        if (counts.completed + counts.failed) % SAVED_EVERY == 0:
            await self._save(run, counted)
        else:
            run.stored = replace(run.stored, batch=counted)

    async def _fail(self, run: _Run, problems: tuple[Problem, ...]) -> None:
        """End a batch that cannot go on. The client gets the results so far."""
        files = await asyncio.to_thread(self._result_files, run)
        errors = Problems(data=problems)
        await self._save(run, replace(run.stored.batch, status="failed", failed_at=unix_s(), errors=errors, **files))

    def _result_files(self, run: _Run) -> dict[str, str | None]:
        """Turn the results into files of the client, and return their ids."""
        owner, batch_id = run.stored.owner, run.stored.batch.id
        results = self._batches.results(batch_id)
        return {
            "output_file_id": self._files.adopt(owner, f"{batch_id}_output.jsonl", results.output),
            "error_file_id": self._files.adopt(owner, f"{batch_id}_errors.jsonl", results.errors),
        }

    async def _finish(self, run: _Run) -> None:
        """End a batch whose requests have ended. A second call after a crash goes on."""
        if not run.is_cancelled:
            await self._save(run, replace(run.stored.batch, status="finalizing", finalizing_at=unix_s()))
        files = await asyncio.to_thread(self._result_files, run)
        if run.is_cancelled:
            await self._save(run, replace(run.stored.batch, status="cancelled", cancelled_at=unix_s(), **files))
        else:
            await self._save(run, replace(run.stored.batch, status="completed", completed_at=unix_s(), **files))

    async def _ask(self, run: _Run, path: Path, offset: int, place: _Place) -> ResultLine | None:
        """Send a request until the cluster accepts it. None: the batch was cancelled meanwhile.

        Between two tries, other batches have its place, and its body is not in memory.
        """
        batch = run.stored.batch
        while not run.is_cancelled:
            line = json.decode((await asyncio.to_thread(line_at, path, offset))[0], type=BatchLine)
            custom_id = line.custom_id
            request_id = f"{batch.id}-{blake2b(custom_id.encode(), digest_size=12).hexdigest()}"
            status, body, wait_s = await self._call(run.stored, batch.endpoint, request_id, bytes(line.body))
            if status not in BUSY_STATUSES:
                response = LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))
                return ResultLine(id=f"batch_req_{request_id}", custom_id=custom_id, response=response)
            del line, body
            await place.leave(wait_s)
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


class _Place:
    """A place for a request in the cluster. It is free again at the end of the block, or of the request's task."""

    def __init__(self, own: asyncio.Semaphore, places: asyncio.Semaphore) -> None:
        """`own`: bounds the requests of the batch. `places`: bounds those of all batches in the cluster."""
        self._own = own
        self._places = places
        self._is_held = False
        """Whether it has one of `places`."""
        self._is_kept = False

    async def __aenter__(self) -> _Place:
        await self._own.acquire()
        try:
            await self._take()
        except asyncio.CancelledError:
            self._own.release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_kept:
            self._give_back()

    def keep_until_done(self, task: asyncio.Task[None]) -> None:
        self._is_kept = True
        task.add_done_callback(lambda _: self._give_back())

    async def leave(self, wait_s: float) -> None:
        """Let requests of other batches use the place in the cluster for some seconds."""
        self._places.release()
        self._is_held = False
        await asyncio.sleep(wait_s)
        await self._take()

    async def _take(self) -> None:
        await self._places.acquire()
        self._is_held = True

    def _give_back(self) -> None:
        self._own.release()
        if self._is_held:
            self._places.release()
