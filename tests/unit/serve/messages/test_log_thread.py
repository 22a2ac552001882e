"""A decision log whose disk is slow: no append waits for it, and the log is complete up to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from baton.compute.hash_engine import hash_card
from baton.core.config import Config
from baton.core.messages import RequestCancelled
from baton.core.types import RequestId
from baton.serve.live.assembly import assemble
from baton.serve.live.log_file import LogWriter, read_log
from baton.serve.live.log_thread import LogThread
from baton.serve.live.metrics_registry import render
from tests.unit.serve.messages.test_log_file import DECISIONS, HEADER


class SlowWriter(LogWriter):
    """A disk that takes nothing before `is_fast` is set."""

    def __init__(self, path: Path) -> None:
        self.is_fast = threading.Event()
        self.is_fast.set()  # for the header
        super().__init__(path, HEADER, 1 << 20)
        self.is_fast.clear()

    def write(self, entries: Sequence[bytes]) -> None:
        self.is_fast.wait()
        super().write(entries)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowWriter]:
    writer = SlowWriter(tmp_path / "log")
    yield writer
    writer.is_fast.set()


def test_entries_wait_in_order_for_a_slow_disk_and_are_complete_at_the_end(slow: SlowWriter) -> None:
    log = LogThread(slow)
    assert all(log.append(decision) for decision in DECISIONS)
    assert list(read_log(log.path)[1]) == []
    slow.is_fast.set()
    log.close()
    assert list(read_log(log.path)[1]) == DECISIONS
    assert not log.append(DECISIONS[0])


def test_a_reader_gets_every_entry(slow: SlowWriter) -> None:
    log = LogThread(slow)
    for decision in DECISIONS:
        log.append(decision)
    slow.is_fast.set()
    log.flush()
    assert list(read_log(log.path)[1]) == DECISIONS
    log.close()


def test_more_than_the_bound_ends_the_log_without_a_hole(slow: SlowWriter, caplog: pytest.LogCaptureFixture) -> None:
    """A small entry after a large one that did not fit would fit again."""
    log = LogThread(slow, unwritten_bytes_max=1000)
    written = 0
    with caplog.at_level(logging.ERROR, logger="baton.server"):
        while log.append(DECISIONS[written % len(DECISIONS)]):
            written += 1
        slow.is_fast.set()
        log.flush()
        assert not log.append(DECISIONS[0])
        log.close()
    assert log.full
    assert written > 2
    assert list(read_log(log.path)[1]) == [DECISIONS[index % len(DECISIONS)] for index in range(written)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the disk is too slow" in line
    assert "1000 may" in line


def test_decisions_after_the_end_of_the_log_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parts = assemble(Config(model="hash", log=str(log), log_bytes_max=4000, log_kept_bytes_max=0), hash_card())
    assert parts.driver.log is not None
    assert parts.own is not None
    for number in range(100):
        parts.driver.tell(RequestCancelled(RequestId(f"unknown-{number}")))
    parts.driver.log.close()
    parts.own.arena.close()
    logged = sum(isinstance(entry.event, RequestCancelled) for entry in read_log(log)[1])
    assert 0 < logged < 100
    assert f"baton_unlogged_decisions_total {100 - logged}.0" in render(parts.metrics, {"hash": parts.metrics}).decode()
