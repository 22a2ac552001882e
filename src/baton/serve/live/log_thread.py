"""Write the decision log in a thread, so that a slow disk delays no stream."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import BinaryIO

from baton.core.config import Config
from baton.decide.control.decision_log import Decision, LogHeader
from baton.serve.live.kept_logs import keep_earlier_log
from baton.serve.live.log_file import LogWriter

UNWRITTEN_BYTES_MAX = 64 * 1024 * 1024
"""Maximum bytes of entries that wait for the disk. Beyond it the log ends, because a replay needs every entry."""
FLUSH_S = 10.0
"""Maximum seconds that the server's shutdown, or a reader of the log, waits for the disk."""

log = logging.getLogger("baton.server")


def open_log(config: Config, header: LogHeader) -> LogThread | None:
    """Open the decision log, and keep earlier ones. Return None if none is configured.

    Raises ConfigError if it cannot be written.
    """
    if not config.log:
        return None
    path, kept_bytes_max = Path(config.log), config.log_kept_bytes_max
    keep_earlier_log(path, kept_bytes_max)
    return LogThread(LogWriter(path, header, config.log_bytes_max, kept_bytes_max=kept_bytes_max))


class LogThread:
    """Passes decisions in order to a thread that writes them. A killed process loses the decisions not yet written."""

    def __init__(self, writer: LogWriter, unwritten_bytes_max: int = UNWRITTEN_BYTES_MAX) -> None:
        self.path: Path = writer.path
        self._writer = writer
        self._unwritten_bytes_max = unwritten_bytes_max
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._unwritten_bytes = 0
        """Bytes of the entries that wait, and of those that the thread is writing."""
        self._is_closed = False
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="baton-decision-log", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """True if the log has ended while the server runs, so that later decisions are missing."""
        return self._writer.full

    def append(self, entry: Decision) -> bool:
        """Pass an entry to the thread. Return False if the log has ended and will not contain the entry."""
        data = b"" if self._writer.full else self._writer.encode(entry)
        with self._changed:
            if self._unwritten_bytes + len(data) > self._unwritten_bytes_max:
                self._writer.end_here(
                    f"the disk is too slow: {self._unwritten_bytes} bytes wait, at most {self._unwritten_bytes_max} may"
                )
            if self._writer.full or self._is_closed:
                self._tell()
                return False
            self._waiting.append(data)
            self._unwritten_bytes += len(data)
            self._changed.notify_all()
        return True

    def sizes(self) -> list[int]:
        """Wait as `flush` does. Return the size of each file of the log in bytes. Raises OSError."""
        self.flush()
        return self._writer.sizes()

    def open_file(self, index: int) -> BinaryIO:
        """Open a file of the log for reading, by its place in `sizes`. Raises OSError."""
        return self._writer.open_file(index)

    def flush(self) -> None:
        """Wait until every entry is written, for at most `FLUSH_S` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten_bytes, FLUSH_S)

    def close(self) -> None:
        """Write the remaining entries and close the file. Entries of timers that end later are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            log.error("the decision log %s lacks its end: the disk takes longer than %g s", self.path, FLUSH_S)

    def _run(self) -> None:
        while entries := self._take():
            self._writer.write(entries)
            with self._changed:
                self._unwritten_bytes -= sum(map(len, entries))
                if self._writer.full:
                    self._tell()
                self._changed.notify_all()
        self._writer.close()

    def _take(self) -> list[bytes]:
        """Wait for entries and return them. Return none once the log is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            entries, self._waiting = self._waiting, []
            return entries

    def _tell(self) -> None:
        """Log once that the log has ended. The caller holds the lock."""
        if self._writer.full and not self._is_told:
            self._is_told = True
            log.error("%s", self._writer.end)
