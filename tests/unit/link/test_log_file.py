"""Decision logs on disk: what was written is read, and what is damaged is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.control.decision_log import Decision, LogHeader
from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.core.messages import RequestCancelled
from baton.core.types import RequestId
from baton.link.log_file import LogWriter, read_log

HEADER = LogHeader(policy=PolicyConfig(), block_tokens=16, attempts_max=3)
DECISIONS = [Decision(float(second), RequestCancelled(RequestId(f"r-{second}")), ()) for second in range(20)]


def _write(path: Path, *, bytes_max: int = 1 << 20) -> LogWriter:
    writer = LogWriter(path, HEADER, bytes_max)
    for decision in DECISIONS:
        writer.append(decision)
    writer.close()
    return writer


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert not _write(tmp_path / "log").full
    header, decisions = read_log(tmp_path / "log")
    assert header == HEADER
    assert list(decisions) == DECISIONS


def test_a_log_ends_at_its_bound_with_a_whole_entry(tmp_path: Path) -> None:
    """INV-9: however long the server runs."""
    path = tmp_path / "log"
    _write(path)
    whole_bytes = len(path.read_bytes())
    assert _write(path, bytes_max=whole_bytes - 1).full
    assert len(path.read_bytes()) < whole_bytes
    assert list(read_log(path)[1]) == DECISIONS[:-1]


def test_a_torn_last_entry_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    _write(path)
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_log(path)[1]) == DECISIONS[:-1]


@pytest.mark.parametrize("position", [4, -10], ids=["in the header", "in the middle"])
def test_damage_is_a_clear_error_wherever_it_is(tmp_path: Path, position: int) -> None:
    path = tmp_path / "log"
    _write(path)
    data = bytearray(path.read_bytes())
    data[position : position + 4] = b"\xc1\xc1\xc1\xc1"  # no msgpack begins so
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is no decision log"):
        list(read_log(path)[1])
