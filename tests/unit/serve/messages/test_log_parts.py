"""A decision log goes on in further files, and is read as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.core.messages import RequestCancelled
from baton.core.types import RequestId
from baton.decide.control.decision_log import Decision
from baton.serve.live.kept_logs import keep_earlier_log, kept_logs
from baton.serve.live.log_file import PART_BYTES, LogWriter, read_log
from baton.serve.live.log_thread import LogThread, open_log
from tests.unit.serve.messages.test_log_file import HEADER

FILE_BYTES = 4000
DECISIONS = [Decision(float(second), RequestCancelled(RequestId(f"request-{second}")), ()) for second in range(400)]


def written(path: Path, kept_bytes_max: int, decisions: list[Decision] = DECISIONS) -> LogWriter:
    """Write a log by its thread. Return its writer, after the end."""
    writer = LogWriter(path, HEADER, FILE_BYTES, kept_bytes_max=kept_bytes_max)
    log = LogThread(writer)
    for decision in decisions:
        log.append(decision)
    log.close()
    return writer


def test_a_log_over_several_files_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    writer = written(path, 1 << 20)
    files = [*kept_logs(path), path]
    assert len(files) > 4
    assert not writer.full
    assert all(file.stat().st_size <= FILE_BYTES for file in files)
    assert read_log(path)[0] == HEADER
    assert list(read_log(path)[1]) == DECISIONS
    until = list(read_log(files[2])[1])
    assert until == DECISIONS[: len(until)]
    assert 0 < len(until) < len(DECISIONS)


def test_a_server_sends_all_files_of_its_log_as_one(tmp_path: Path) -> None:
    """Also those that were added after it had announced the size."""
    path = tmp_path / "run.log"
    writer = LogWriter(path, HEADER, FILE_BYTES, kept_bytes_max=1 << 20)
    log = LogThread(writer)
    for decision in DECISIONS[:200]:
        log.append(decision)
    sizes = log.sizes()
    for decision in DECISIONS[200:]:
        log.append(decision)
    log.close()
    sent = bytearray()
    for index, size_bytes in enumerate(sizes):
        with log.open_file(index) as file:
            sent += file.read(size_bytes)
    (tmp_path / "sent").write_bytes(sent)
    assert len(sizes) > 2
    assert list(read_log(tmp_path / "sent")[1]) == DECISIONS[:200]


def test_earlier_runs_are_deleted_before_files_of_this_one(tmp_path: Path) -> None:
    """INV-9. A log without its first file could not be replayed, so the log ends instead."""
    path, kept_bytes_max = tmp_path / "run.log", 5 * FILE_BYTES
    written(path, kept_bytes_max, DECISIONS[:100])
    keep_earlier_log(path, kept_bytes_max)
    writer = written(path, kept_bytes_max, DECISIONS * 3)
    assert writer.full
    assert f"log_kept_bytes_max is {kept_bytes_max}" in writer.end
    assert sum(file.stat().st_size for file in kept_logs(path)) <= kept_bytes_max
    assert path.stat().st_size <= FILE_BYTES
    decisions = list(read_log(path)[1])
    assert decisions == (DECISIONS * 3)[: len(decisions)]
    assert len(decisions) > 100


def test_a_log_whose_earlier_file_is_missing_or_another_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    written(path, 1 << 20)
    first, second, *_ = kept_logs(path)
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(
        ConfigError, match=r"goes on after .*run\.log\.1 .* is missing: put all files of a log into one"
    ):
        read_log(path)
    first.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"run\.log\.1 with \d+ bytes, which has \d+ bytes"):
        read_log(path)


def test_a_file_that_continues_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    written(path, 1 << 20)
    second = kept_logs(path)[1]
    content = second.read_bytes().replace(b"run.log.1", b"run.log.2")
    second.write_bytes(content)
    with pytest.raises(ConfigError, match="goes on after"):
        read_log(second)


def test_an_entry_above_the_size_of_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    large = Decision(0.0, RequestCancelled(RequestId("r" * 2 * FILE_BYTES)), ())
    decisions = [DECISIONS[0], large, large, DECISIONS[1]]
    written(path, 1 << 20, decisions)
    assert list(read_log(path)[1]) == decisions
    assert len(kept_logs(path)) == 3
    assert all(file.stat().st_size < 2 * FILE_BYTES + PART_BYTES for file in kept_logs(path))


def test_a_log_that_cannot_go_on_in_another_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    (tmp_path / "run.log.new").mkdir()
    writer = written(path, 1 << 20)
    assert writer.full
    assert "Is a directory" in writer.end
    decisions = list(read_log(path)[1])
    assert decisions == DECISIONS[: len(decisions)]
    assert len(decisions) > 10


def test_every_kind_of_server_keeps_its_earlier_logs(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    config = Config(log=str(path))
    for _ in range(2):
        log = open_log(config, HEADER)
        assert log is not None
        log.close()
    assert [kept.name for kept in kept_logs(path)] == ["run.log.1"]
    assert open_log(Config(), HEADER) is None
