"""A new run of a server never overwrites the log of an earlier one."""

from __future__ import annotations

from fcntl import LOCK_EX, flock
from pathlib import Path

from baton.serve.live.kept_logs import keep_earlier_log, kept_logs


def test_logs_are_numbered_and_the_oldest_is_deleted_beyond_the_size(tmp_path: Path) -> None:
    path = tmp_path / "run[1].log"
    for run in range(12):
        keep_earlier_log(path, kept_bytes_max=1000)
        path.write_text(f"{run:04d}")
    assert [kept.name for kept in kept_logs(path)] == [f"run[1].log.{number}" for number in range(1, 12)]
    assert [kept.read_text() for kept in kept_logs(path)] == [f"{run:04d}" for run in range(11)]
    keep_earlier_log(path, kept_bytes_max=11)
    assert [kept.read_text() for kept in kept_logs(path)] == ["0010", "0011"]
    assert not path.exists()


def test_an_empty_log_and_one_in_use_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    keep_earlier_log(path, 1000)
    path.touch()
    keep_earlier_log(path, 1000)
    path.write_text("in use")
    with path.open("rb") as file:
        flock(file, LOCK_EX)
        keep_earlier_log(path, 1000)
        assert path.read_text() == "in use"
    assert kept_logs(path) == []
    (tmp_path / "run.log.old").write_text("no number")
    keep_earlier_log(path, 1000)
    assert [kept.name for kept in kept_logs(path)] == ["run.log.1"]
