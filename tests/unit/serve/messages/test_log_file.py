"""Decision logs on disk: what was written is read, and what is damaged is said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.core.config import PolicyConfig
from baton.core.errors import ConfigError
from baton.core.messages import RequestCancelled
from baton.core.types import RequestId
from baton.decide.control.decision_log import LOG_VERSION, Decision, LogHeader
from baton.move.ipc.frames import frame
from baton.serve.live.log_file import LogWriter, cut_bytes, read_log

HEADER = LogHeader(policy=PolicyConfig(), block_tokens=16)
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


@pytest.mark.parametrize(
    ("version", "by"), [(LOG_VERSION - 1, "an older Baton"), (1, "an older Baton"), (LOG_VERSION + 1, "a newer Baton")]
)
def test_a_log_of_another_version_says_what_to_do(version: int, by: str, tmp_path: Path) -> None:
    """Whatever its entries are: they may be of kinds that nobody knows here."""
    path = tmp_path / "log"
    header = {"type": "LogHeader", "version": version, "plan": "unknown"}
    path.write_bytes(frame(msgspec.msgpack.encode(header)) + frame(b"\x00"))
    with pytest.raises(ConfigError) as caught:
        read_log(path)
    said = str(caught.value)
    assert f"{path} is a decision log of version {version}, by {by}, and this one reads version {LOG_VERSION}" in said
    assert "write it anew" in said


def test_a_log_is_called_what_its_reader_calls_it(tmp_path: Path) -> None:
    """One that a server has sent lies in a file that nobody knows of."""
    (tmp_path / "log").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^http://server is no decision log"):
        read_log(tmp_path / "log", "http://server")


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
    assert cut_bytes(path) == 0
    whole, last_bytes = path.read_bytes(), len(frame(msgspec.msgpack.encode(DECISIONS[-1])))
    path.write_bytes(whole[:-3])
    assert list(read_log(path)[1]) == DECISIONS[:-1]
    assert cut_bytes(path) == last_bytes - 3
    path.write_bytes(whole[: 2 - last_bytes])
    assert cut_bytes(path) == 2, "even of its length, only a part is there"


@pytest.mark.parametrize("position", [4, -10], ids=["in the header", "in the middle"])
def test_damage_is_a_clear_error_wherever_it_is(tmp_path: Path, position: int) -> None:
    path = tmp_path / "log"
    _write(path)
    data = bytearray(path.read_bytes())
    data[position : position + 4] = b"\xc1\xc1\xc1\xc1"  # no msgpack begins so
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="is no decision log"):
        list(read_log(path)[1])


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b'{"json": true}', b"\x01\x00\x00\x00\xc0", bytes(64)],
    ids=["empty", "one byte", "text", "json", "a frame of nothing we know", "zeros"],
)
def test_a_foreign_file_is_no_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no decision log: it does not begin with the header of one"):
        read_log(path)


def test_a_folder_and_a_missing_file_are_no_logs(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=f"{path.name}: cannot read the log: "):
            read_log(path)


def test_decisions_without_a_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    _write(path)
    data = path.read_bytes()
    path.write_bytes(data[4 + int.from_bytes(data[:4], "little") :])
    with pytest.raises(ConfigError, match="no decision log: it does not begin with the header of one"):
        read_log(path)


def test_a_log_that_cannot_be_begun_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another file"):
        LogWriter(tmp_path / "missing" / "log", HEADER, 1 << 20)
    with pytest.raises(ConfigError, match="raise log_bytes_max"):
        LogWriter(tmp_path / "log", HEADER, 10)


def test_after_its_bound_nothing_is_written_even_if_it_would_fit(tmp_path: Path) -> None:
    """A log with a hole would replay to something else."""
    path = tmp_path / "log"
    long = Decision(0.0, RequestCancelled(RequestId("r" * 500)), ())
    writer = LogWriter(path, HEADER, 2000)
    while not writer.full:
        writer.append(long)
    writer.append(DECISIONS[0])
    writer.close()
    assert set(read_log(path)[1]) == {long}
    assert "log_bytes_max is 2000" in writer.end


def test_a_disk_that_is_full_ends_the_log_and_not_the_server(tmp_path: Path) -> None:
    """The entry that the disk took only a part of is left out by who reads, and nothing is written behind it."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "log"
    writer = LogWriter(path, HEADER, 1 << 20)
    size_bytes = len(path.read_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 10, hard))
    try:
        writer.append(DECISIONS[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert writer.full
    writer.append(DECISIONS[1])
    writer.close()
    assert len(path.read_bytes()) == size_bytes + 10
    assert list(read_log(path)[1]) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_refuses_everything_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no room for its first entry"):
        LogWriter(Path("/dev/full"), HEADER, 1 << 20)


def test_a_log_that_is_being_written_is_nobody_elses(tmp_path: Path) -> None:
    """A second server with the same flag emptied the first one's log, and neither said so."""
    path = tmp_path / "log"
    writer = LogWriter(path, HEADER, 1 << 20)
    writer.append(DECISIONS[0])
    with pytest.raises(ConfigError, match=r"another process writes the decision log .*; choose another file"):
        LogWriter(path, HEADER, 1 << 20)
    writer.append(DECISIONS[1])
    writer.close()
    assert list(read_log(path)[1]) == DECISIONS[:2]
    _write(path)
    assert list(read_log(path)[1]) == DECISIONS, "one that nobody writes any more begins anew"
