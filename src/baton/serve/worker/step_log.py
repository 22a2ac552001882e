"""Log of a worker's steps, with their sizes and durations. The `fitted` cost model is computed from it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from baton.core.errors import ConfigError
from baton.core.files import make_private_folder, open_private
from baton.core.types import StepShape, WorkerId
from baton.decide.cost.fitted import LoggedStep

log = logging.getLogger("baton.worker")

_BUFFER_BYTES = 1 << 16


class StepLogWriter:
    """Appends one line per step to FOLDER/WORKER.jsonl, until the file reaches its maximum size (INV-9)."""

    def __init__(self, folder: Path, worker: WorkerId, bytes_max: int) -> None:
        """Start a new log. If the file cannot be opened, log a warning and write no steps."""
        self._path = folder / f"{worker}.jsonl"
        self._left_bytes = bytes_max
        self._file: BinaryIO | None = None
        self._encoder = msgspec.json.Encoder()
        try:
            make_private_folder(folder)
            self._file = open_private(self._path, "wb", _BUFFER_BYTES)
        except OSError as error:
            self._end(error)

    def note(self, shape: StepShape, *, at_s: float, engine_s: float, turn_s: float) -> None:
        """Append a step. Does nothing once the log is full or the disk has failed: serving must go on."""
        step = LoggedStep(
            prefill_tokens=shape.prefill_tokens,
            prefill_chunks=shape.prefill_chunks,
            prefill_pairs=shape.prefill_pairs,
            decode_requests=shape.decode_requests,
            context_tokens=shape.context_tokens,
            step_s=turn_s,
            at_s=at_s,
            engine_s=engine_s,
        )
        line = self._encoder.encode(step) + b"\n"
        self._left_bytes -= len(line)
        if self._left_bytes < 0 or self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            self._end(error)

    def close(self) -> None:
        """Flush the buffered lines and close the file. A worker that is killed loses its buffered lines."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _end(self, error: OSError) -> None:
        self._left_bytes = 0
        log.warning("the step log %s ends here: %s; requests go on, later steps are not written", self._path, error)


def prepare_step_log(folder: Path) -> None:
    """Create the folder of the step logs before any worker starts. Raises ConfigError if it cannot be written."""
    try:
        make_private_folder(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "it is not writable")
    except OSError as error:
        raise ConfigError(f"cannot write step logs in {folder}: {error.strerror}; choose another step_log") from error
