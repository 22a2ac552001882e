"""Decision logs on disk: frames of msgpack, appended one event at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.control.decision_log import LOG_VERSION, Decision, LogEntry, LogHeader
from baton.core.errors import ConfigError
from baton.link.frames import FrameReader, frame

_READ_BYTES = 1 << 20


class LogWriter:
    """Appends decisions as they are made, unbuffered: a crash loses none. Stops at its bound (INV-9)."""

    def __init__(self, path: Path, header: LogHeader, bytes_max: int) -> None:
        """Start a new log. Raises ConfigError where the file cannot be written."""
        self.full = False
        self._encoder = msgspec.msgpack.Encoder()
        self._left_bytes = bytes_max
        try:
            self._file: BinaryIO = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {path}: {error}; choose another file") from error
        self.append(header)

    def append(self, entry: LogEntry) -> None:
        """Write an entry, unless the log is full or the disk refuses it; `full` says so."""
        data = frame(self._encoder.encode(entry))
        self._left_bytes -= len(data)
        if self.full or self._left_bytes < 0:
            self.full = True
            return
        try:
            self.full = self._file.write(data) < len(data)
        except OSError:
            self.full = True

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> tuple[LogHeader, Iterator[Decision]]:
    """Open a log. A last entry that was cut off by a crash is left out.

    Raises ConfigError for what is no such log, here or while it is read.
    """
    entries = _entries(path)
    header = next(entries, None)
    if not isinstance(header, LogHeader) or header.version != LOG_VERSION:
        raise ConfigError(f"{path} is no decision log of version {LOG_VERSION}; `baton serve --log FILE` writes one")
    return header, (entry for entry in entries if isinstance(entry, Decision))


def _entries(path: Path) -> Iterator[LogEntry]:
    decoder = msgspec.msgpack.Decoder(LogEntry)
    reader = FrameReader()
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                for payload in reader.feed(data):
                    yield decoder.decode(payload)
    except (ValueError, OSError) as error:  # msgspec.DecodeError is a ValueError
        raise ConfigError(f"{path} is no decision log: {error}; `baton serve --log FILE` writes one") from error
