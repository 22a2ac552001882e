"""The runner of batches: what waiting ones hold, and what rejected ones leave to others."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from msgspec import structs
from starlette.types import Receive, Scope, Send

from baton.core.http_config import BatchesConfig
from baton.core.limits import LimitsConfig
from baton.serve.http.batches.runner import BatchRunner
from baton.serve.http.batches.store import BatchStore, FileStore, Folder, StoredBatch
from baton.serve.http.budgets import Budgets
from baton.serve.http.wire.errors import ClusterError
from tests.http.test_batches import CHAT, FOR_BATCHES, as_file, question, stored


class BlockedEndpoint:
    """Answers no request."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.release()
        await asyncio.Event().wait()


class WatchedStore(BatchStore):
    """Tells how many batches have begun to run, and how many have ended."""

    def __init__(self, folder: Folder, batches_max: int) -> None:
        super().__init__(folder, batches_max)
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def save(self, stored: StoredBatch) -> None:
        super().save(stored)
        if stored.batch.status in ("in_progress", "completed", "failed"):
            (self.begun if stored.batch.status == "in_progress" else self.ended).release()


class BusyEndpoint:
    """Rejects the requests of one user, and answers the others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if b"rejected" in (await receive())["body"]:
            raise ClusterError("come again", status=503, code="queue_full", retry_after_s=3600.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_a_batch_that_is_rejected_for_now_does_not_hold_up_others(tmp_path: Path) -> None:
    config = BatchesConfig(requests_max=2)
    folder, count = Folder(str(tmp_path)), 20
    files, batches = FileStore(folder, config), WatchedStore(folder, count)
    owners = ("rejected", "accepted")
    inputs = [
        files.add("me", name, as_file([question(number, user=name) for number in range(count)]), FOR_BATCHES)
        for name in owners
    ]

    async def run_all() -> list[str]:
        runner = BatchRunner(config, files, batches, {CHAT: BusyEndpoint()}, Budgets(LimitsConfig()), 1 << 20)
        made = [
            structs.replace(one, batch=structs.replace(one.batch, input_file_id=file.id))
            for one, file in ((stored(number, "validating"), file) for number, file in enumerate(inputs))
        ]
        for each in made:
            batches.add(each)
            runner.start(each)

        assert await asyncio.to_thread(batches.ended.acquire, timeout=60), "the second batch does not end"
        found = {each.batch.id: each.batch.status for each in batches.list()}
        await runner.close()
        return [found[each.batch.id] for each in made]

    assert asyncio.run(run_all()) == ["in_progress", "completed"]
    folder.close()


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_waiting_batches_hold_no_memory_and_no_file(tmp_path: Path) -> None:
    """A client may start 1,000 batches of one file of 32 MB."""
    config = BatchesConfig(requests_max=2)
    folder, endpoint, count = Folder(str(tmp_path)), BlockedEndpoint(), 50
    files, batches = FileStore(folder, config), WatchedStore(folder, count)
    content = as_file([question(number, user="x" * 100_000) for number in range(10)])
    file = files.add("me", "in", content, FOR_BATCHES)

    async def run_all() -> tuple[int, int]:
        """Start all batches. Return the further open files and the bytes that they hold."""
        runner = BatchRunner(config, files, batches, {CHAT: endpoint}, Budgets(LimitsConfig()), 1 << 20)
        before = open_files()
        tracemalloc.start()
        for number in range(count):
            one = stored(number, "validating")
            made = structs.replace(one, batch=structs.replace(one.batch, input_file_id=file.id))
            batches.add(made)
            runner.start(made)
        for _ in range(count):
            await asyncio.to_thread(batches.begun.acquire)
        for _ in range(config.requests_max):
            await endpoint.asked.acquire()
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        further = open_files() - before
        await runner.close()
        return further, held_bytes

    further, held_bytes = asyncio.run(run_all())
    assert further < count
    assert held_bytes < 2 * len(content), f"{held_bytes >> 10} KiB for {count} x {len(content) >> 10} KiB"
    folder.close()


class BrokenEndpoint:
    """Fails on every request, as one on a full disk."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_batch_on_which_the_server_failed_says_why(tmp_path: Path) -> None:
    folder, config = Folder(str(tmp_path)), BatchesConfig()
    files, batches = FileStore(folder, config), WatchedStore(folder, 9)
    file = files.add("me", "input", as_file([question(1)]), FOR_BATCHES)
    made = stored(1, "validating")
    made = structs.replace(made, batch=structs.replace(made.batch, input_file_id=file.id))

    async def run() -> StoredBatch:
        runner = BatchRunner(config, files, batches, {CHAT: BrokenEndpoint()}, Budgets(LimitsConfig()), 1 << 20)
        batches.add(made)
        runner.start(made)
        assert await asyncio.to_thread(batches.ended.acquire, timeout=60), "the batch does not end"
        return batches.get("me", made.batch.id)

    ended = asyncio.run(run()).batch
    assert ended.status == "failed"
    assert ended.errors is not None
    assert "No space left on device" in ended.errors.data[0].message
    folder.close()


def test_a_batch_whose_file_was_deleted_is_no_failure_of_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client deleted the file while it made the batch."""
    folder, config = Folder(str(tmp_path)), BatchesConfig()
    files, batches, made = FileStore(folder, config), WatchedStore(folder, 9), stored(1, "validating")

    async def run() -> StoredBatch:
        runner = BatchRunner(config, files, batches, {}, Budgets(LimitsConfig()), 1 << 20)
        batches.add(made)
        runner.start(made)
        assert await asyncio.to_thread(batches.ended.acquire, timeout=60), "the batch does not end"
        return batches.get("me", made.batch.id)

    ended = asyncio.run(run()).batch
    assert ended.errors is not None
    [problem] = ended.errors.data
    assert (ended.status, problem.code, problem.message) == ("failed", "file_not_found", "there is no file 'file-x'")
    assert caplog.records == []
    folder.close()
