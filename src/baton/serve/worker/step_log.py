"""The log of a worker's steps: what was computed in each and how long it took. A `fitted` cost model is made of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.types import StepShape, WorkerId
from baton.decide.cost.step_logs import LoggedStep

_BUFFER_BYTES = 1 << 16


class StepLogWriter:
    """Appends a line per step to FOLDER/WORKER.jsonl, and ends at its bound (INV-9)."""

    def __init__(self, folder: Path, worker: WorkerId, bytes_max: int) -> None:
        """Start a new log. Raises ConfigError where the file cannot be written."""
        path = folder / f"{worker}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot write the step log {path}: {error.strerror}; choose another folder") from error
        self._left_bytes = bytes_max
        self._encoder = msgspec.json.Encoder()

    def note(self, shape: StepShape, *, at_s: float, engine_s: float, turn_s: float) -> None:
        """Write down a step. Nothing once the log is full or the disk refuses it: requests matter more."""
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
        """Write what is still in memory. A worker that is killed loses its last lines."""
        with contextlib.suppress(OSError):
            self._file.close()
