"""Log of a worker's steps, with their sizes and durations. The `fitted` cost model is computed from it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.files import make_private_folder, open_private
from baton.core.types import StepShape, WorkerId
from baton.decide.cost.fitted import LoggedStep

_BUFFER_BYTES = 1 << 16


class StepLogWriter:
    """Append one line per step to FOLDER/WORKER.jsonl, until the file reaches its bound (INV-9)."""

    def __init__(self, folder: Path, worker: WorkerId, bytes_max: int) -> None:
        """Start a new log. Raises ConfigError if the file cannot be written."""
        path = folder / f"{worker}.jsonl"
        try:
            make_private_folder(folder)
            self._file = open_private(path, "wb", _BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot write the step log {path}: {error.strerror}; choose another folder") from error
        self._left_bytes = bytes_max
        self._encoder = msgspec.json.Encoder()

    def note(self, shape: StepShape, *, at_s: float, engine_s: float, turn_s: float) -> None:
        """Append a step. Once the log is full or the disk fails, do nothing: serving must go on."""
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
        if self._left_bytes < 0:
            return
        try:
            self._file.write(line)
        except OSError:
            self._left_bytes = 0

    def close(self) -> None:
        """Flush buffered lines. A worker that is killed loses them."""
        with contextlib.suppress(OSError):
            self._file.close()
