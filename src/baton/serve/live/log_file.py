"""Decision logs on disk: files of msgpack frames, one for the header and one for each event with its decisions."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from io import SEEK_CUR
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import open_private
from baton.decide.control.decision_log import LOG_VERSION, Decision, LogEntry, LogHeader, LogPart, SimHeader
from baton.move.ipc.frames import HEAD_BYTES, FrameReader, frame
from baton.serve.live.kept_logs import delete_oldest_logs, next_kept_log

_READ_BYTES = 1 << 20
PART_BYTES = 512
"""Maximum bytes of the entry that begins a further file: its file name has at most 255."""


class _FileSizes:
    """Divides the entries of a log into files by their sizes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._file_bytes = 0

    def begins_file(self, entry_bytes: int) -> bool:
        """Count the next entry. Return whether it begins a further file: the one before has no room for it."""
        begins = self._file_bytes > 0 and self._file_bytes + entry_bytes > self._bytes_max
        self._file_bytes = PART_BYTES + entry_bytes if begins else self._file_bytes + entry_bytes
        return begins


class LogWriter:
    """Appends decisions to a file, without a buffer. Goes on in further files, and stops at a size limit (INV-9)."""

    def __init__(self, path: Path, header: LogHeader | SimHeader, bytes_max: int, *, kept_bytes_max: int = 0) -> None:
        """Start a log, which replaces an existing file.

        `bytes_max`: maximum size of one file. A full file is renamed to `path` with a number, and the log continues in
        a new file at `path`. `kept_bytes_max`: maximum size of all files; up to `bytes_max`, the log has one file.
        Raises ConfigError if `path` is not writable, or if another process writes a log to it.
        """
        self.full = False
        self._is_closed = False
        self.end = ""
        """Reason why the log has ended while the server runs. Empty: the log has not ended."""
        self.path = path
        self._kept_bytes_max = kept_bytes_max
        self._limit_name = "log_kept_bytes_max" if kept_bytes_max > bytes_max else "log_bytes_max"
        self._limit_bytes = self._left_bytes = max(bytes_max, kept_bytes_max)
        self._encoder = msgspec.msgpack.Encoder()
        self._encoded, self._written = _FileSizes(bytes_max), _FileSizes(bytes_max)
        self._earlier: list[Path] = []
        """The full files of this log."""
        self._files_lock = threading.Lock()
        try:
            self._file = self._open(path)
            self.append(header)
        except BlockingIOError as error:
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
            self.write([self.encode(entry)])

    def encode(self, entry: LogEntry) -> bytes:
        """Encode an entry for `write`. If it would exceed the size limit, set `full` and return no bytes."""
        data = frame(self._encoder.encode(entry))
        self._left_bytes -= len(data) + (PART_BYTES if self._encoded.begins_file(len(data)) else 0)
        if self._left_bytes >= 0:
            return data
        self.end_here(f"{self._limit_name} is {self._limit_bytes}")
        return b""

    def write(self, entries: Sequence[bytes]) -> None:
        """Write encoded entries, in further files where one is full. If the disk fails, set `full`."""
        if self._is_closed:
            return
        try:
            together: list[bytes] = []
            for entry in entries:
                if self._written.begins_file(len(entry)):
                    self._put(b"".join(together))
                    together = []
                    self._begin_file()
                together.append(entry)
            self._put(b"".join(together))
        except OSError as error:
            self._is_closed = True  # the last entry may be incomplete, and no entry may follow it
            self.end_here(str(error.strerror))

    def sizes(self) -> list[int]:
        """Return the size of each file of this log in bytes, the oldest first. Raises OSError."""
        with self._files_lock:
            return [path.stat().st_size for path in (*self._earlier, self.path)]

    def open_file(self, index: int) -> BinaryIO:
        """Open a file of this log for reading, by its place in `sizes`. Raises OSError."""
        with self._files_lock:
            return (*self._earlier, self.path)[index].open("rb")

    def _open(self, path: Path) -> BinaryIO:
        """Open and lock an empty file. Raises OSError."""
        file = open_private(path, "ab", 0)
        try:
            flock(file, LOCK_EX | LOCK_NB)
            if path.is_file():
                file.truncate(0)
        except OSError:
            file.close()
            raise
        return file

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def _begin_file(self) -> None:
        """Give the full file a number, and go on in another one. Older logs are deleted beyond the size limit."""
        full, kept, further = self._file, next_kept_log(self.path), self.path.with_name(f"{self.path.name}.new")
        self._file = self._open(further)
        try:
            part = LogPart(earlier=kept.name, earlier_bytes=self.path.stat().st_size)
            self._put(frame(self._encoder.encode(part)))
            with self._files_lock:
                self.path.rename(kept)
                self._earlier.append(kept)
                further.rename(self.path)
        except OSError:
            further.unlink(missing_ok=True)
            raise
        finally:
            full.close()
        delete_oldest_logs(self.path, self._kept_bytes_max)

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

    `path`: the last file of the log, which names the one before it, and so on. `name`: name of the log in error
    messages, by default the path. Raises ConfigError, here or while the decisions are read, if the file is not a
    decision log or has another version, or if an earlier file is missing.
    """
    name = name or str(path)
    payloads = _payloads(path, name)
    first = next(payloads, b"")
    _check_version(first, name)
    header, decisions = _decoded([first], name), _decoded(payloads, name)
    return next(entry for entry in header if isinstance(entry, LogHeader | SimHeader)), (
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
    try:
        with path.open("rb") as last:  # it stays the last one, if the server begins another file meanwhile
            for earlier in _earlier_files(path, last, name):
                with earlier.open("rb") as file:
                    yield from _file_payloads(file, str(earlier))
            yield from _file_payloads(last, name)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read the log: {error.strerror}") from error


def _file_payloads(file: BinaryIO, name: str) -> Iterator[bytes]:
    reader, count = FrameReader(), 0
    try:
        while data := file.read(_READ_BYTES):
            for payload in reader.feed(data):
                yield payload
                count += 1
    except ValueError as error:
        raise _no_log(name, f"it is damaged after entry {count}: {error}" if count else _NO_HEADER) from error


def _earlier_files(path: Path, last: BinaryIO, name: str) -> list[Path]:
    """Return the files before the last one of a log, the oldest first. Raises ConfigError if one is missing."""
    found: list[Path] = []
    part = _part_of(last)
    while part is not None:
        earlier = path.parent / Path(part.earlier).name
        size_bytes = earlier.stat().st_size if earlier.is_file() else None
        if size_bytes != part.earlier_bytes or earlier in found:
            has = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise ConfigError(
                f"{name} goes on after {earlier} with {part.earlier_bytes} bytes, which {has}: put all files of a log "
                "into one folder, under their names"
            )
        found.append(earlier)
        with earlier.open("rb") as file:
            part = _part_of(file)
    return found[::-1]


def _part_of(file: BinaryIO) -> LogPart | None:
    """Return the first entry of a further file of a log. None: the file is the first one."""
    head = file.read(HEAD_BYTES)
    payload = file.read(min(int.from_bytes(head, "little"), PART_BYTES))
    file.seek(0)
    with suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(payload, type=LogPart)
    return None


def _decoded(payloads: Iterable[bytes], name: str) -> Iterator[LogEntry]:
    decoder = msgspec.msgpack.Decoder(LogEntry)
    try:
        for payload in payloads:
            yield decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise _no_log(name, error) from error
