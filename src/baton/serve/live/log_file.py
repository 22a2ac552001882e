"""Decision logs on disk: a file of msgpack frames, one for the header and one for each event with its decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fcntl import LOCK_EX, LOCK_NB, flock
from io import SEEK_CUR
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import open_private
from baton.decide.control.decision_log import LOG_VERSION, Decision, LogEntry, LogHeader, SimHeader
from baton.move.ipc.frames import HEAD_BYTES, FrameReader, frame

_READ_BYTES = 1 << 20


class LogWriter:
    """Appends decisions to a file, without a buffer. Stops at the size limit (INV-9)."""

    def __init__(self, path: Path, header: LogHeader | SimHeader, bytes_max: int) -> None:
        """Start a log, which replaces an existing file.

        Raises ConfigError if the file is not writable or another process writes a log to it.
        """
        self.full = False
        self._is_closed = False
        self.end = ""
        """Reason why the log has ended while the server runs. Empty: the log has not ended."""
        self.path = path
        self._bytes_max = bytes_max
        self._encoder = msgspec.msgpack.Encoder()
        self._left_bytes = bytes_max
        try:
            self._file = open_private(path, "ab", 0)
            flock(self._file, LOCK_EX | LOCK_NB)
            if path.is_file():
                self._file.truncate(0)
            self.append(header)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(f"another process writes the decision log {path}; choose another file") from error
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {path}: {error.strerror}; choose another file") from error
        if self.full:
            self._file.close()
            raise ConfigError(
                f"the decision log {path} has no room for its first entry; free some, or raise log_bytes_max"
            )

    def append(self, entry: LogEntry) -> None:
        """Write an entry. If the size limit is reached or the disk fails, set `full` and write nothing more."""
        if not self.full:
            self.write(self.encode(entry))

    def encode(self, entry: LogEntry) -> bytes:
        """Encode an entry for `write`. If it would exceed the size limit, set `full` and return no bytes."""
        data = frame(self._encoder.encode(entry))
        self._left_bytes -= len(data)
        if self._left_bytes >= 0:
            return data
        self.end_here(f"log_bytes_max is {self._bytes_max}")
        return b""

    def write(self, data: bytes) -> None:
        """Write encoded entries. If the disk fails, set `full`."""
        if self._is_closed:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._is_closed = True  # the last entry may be incomplete, and no entry may follow it
            self.end_here(str(error.strerror))

    def end_here(self, why: str) -> None:
        """End the log: set `end` to the reason, then `full`, after which another thread reads `end`."""
        self.end = (
            f"the decision log {self.path} ends here: {why}; requests go on, later decisions are not written. "
            "To log again, make room and restart"
        )
        self.full = True

    def close(self) -> None:
        """Close the file. Later entries, of connections and timers that end after it, are dropped."""
        self._is_closed = True
        self._file.close()


_NO_HEADER = "it does not begin with the header of one"


class _AnyHeader(Struct):
    """The fields that a log's header has in every version."""

    type: str = ""
    version: int = 0


def read_log(path: Path, name: str = "") -> tuple[LogHeader | SimHeader, Iterator[Decision]]:
    """Open a log. Return its header and its decisions, without an incomplete last entry that a crash has left.

    `name`: name of the log in error messages, by default the path. Raises ConfigError, here or while the decisions are
    read, if the file is not a decision log or has another version.
    """
    name = name or str(path)
    payloads = _payloads(path, name)
    first = next(payloads, b"")
    _check_version(first, name)
    header, decisions = _decoded([first], name), _decoded(payloads, name)
    return next(entry for entry in header if not isinstance(entry, Decision)), (
        entry for entry in decisions if isinstance(entry, Decision)
    )


def _check_version(first: bytes, name: str) -> None:
    """Raise ConfigError if the file is no decision log, or has a version whose entries may be unknown."""
    try:
        header = msgspec.msgpack.decode(first, type=_AnyHeader)
    except msgspec.MsgspecError as error:
        raise _no_log(name, _NO_HEADER) from error
    if header.type not in (LogHeader.__name__, SimHeader.__name__):
        raise _no_log(name, _NO_HEADER)
    if header.version != LOG_VERSION:
        by = "an older Baton" if header.version < LOG_VERSION else "a newer Baton"
        raise ConfigError(
            f"{name} is a decision log of version {header.version}, by {by}, and this one reads version {LOG_VERSION}: "
            "read it with the Baton that wrote it, or write it anew (`baton serve --log FILE`, `baton sim --log FILE`)"
        )


def _no_log(name: str, why: object) -> ConfigError:
    return ConfigError(f"{name} is no decision log: {why}; `baton serve --log FILE` writes one")


def cut_bytes(path: Path) -> int:
    """Return the size in bytes of an incomplete last entry, which `read_log` leaves out. 0: the log is complete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while (head := file.read(HEAD_BYTES)) and len(head) == HEAD_BYTES:
            payload_bytes = int.from_bytes(head, "little")
            if file.tell() + payload_bytes > size:
                return size - file.tell() + HEAD_BYTES
            file.seek(payload_bytes, SEEK_CUR)
        return len(head)


def _payloads(path: Path, name: str) -> Iterator[bytes]:
    reader, count = FrameReader(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                for payload in reader.feed(data):
                    yield payload
                    count += 1
    except OSError as error:
        raise ConfigError(f"{name}: cannot read the log: {error.strerror}") from error
    except ValueError as error:
        raise _no_log(name, f"it is damaged after entry {count}: {error}" if count else _NO_HEADER) from error


def _decoded(payloads: Iterable[bytes], name: str) -> Iterator[LogEntry]:
    decoder = msgspec.msgpack.Decoder(LogEntry)
    try:
        for payload in payloads:
            yield decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise _no_log(name, error) from error
