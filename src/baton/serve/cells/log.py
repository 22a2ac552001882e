"""The log of a router's decisions: lines of JSON, which `baton replay` decides again (INV-7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from baton.core.errors import ConfigError
from baton.core.files import open_private
from baton.decide.control.cell_router import Cell, CellCommand, CellEvent, CellRouter, CellRules
from baton.move.clock import unix_s


class CellLogHeader(Struct, frozen=True, tag=True):
    weights: dict[str, float]
    """Weight of each cell by its name."""
    rules: CellRules
    version: int = 1


class CellDecision(Struct, frozen=True, tag=True):
    unix_s: int
    event: CellEvent
    commands: list[CellCommand]


_MAGIC = b'{"type":"CellLogHeader"'


class CellLog:
    """Writes the log. It ends, and says so, at its maximum size or if the disk fails."""

    def __init__(
        self, path: Path, cells: Sequence[Cell], rules: CellRules, bytes_max: int, tell: Callable[[str], None]
    ) -> None:
        """Start a log, which replaces an existing file. Raises ConfigError if that fails."""
        self._path = path
        self._left_bytes = bytes_max
        self._tell = tell
        self._encoder = msgspec.json.Encoder()
        try:
            self._file = open_private(path, "wb", 0)
            self._file.write(self._line(CellLogHeader({cell.name: cell.weight for cell in cells}, rules)))
        except OSError as error:
            raise ConfigError(f"cannot write the decision log {path}: {error.strerror}; choose another file") from error

    def append(self, event: CellEvent, commands: Sequence[CellCommand]) -> None:
        if self._left_bytes <= 0:
            return
        line = self._line(CellDecision(unix_s(), event, list(commands)))
        self._left_bytes -= len(line)
        try:
            if self._left_bytes > 0:
                self._file.write(line)
                return
            why = "log_bytes_max is reached"
        except OSError as error:
            self._left_bytes, why = 0, str(error.strerror)
        self._tell(f"the decision log {self._path} ends here: {why}; requests go on, later decisions are not written")

    def close(self) -> None:
        self._left_bytes = 0
        self._file.close()

    def _line(self, entry: CellLogHeader | CellDecision) -> bytes:
        return self._encoder.encode(entry) + b"\n"


def is_cell_log(path: Path) -> bool:
    """Return whether a file is a log of `baton cells`. False, too, if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def replay_cells(path: Path) -> tuple[int, CellDecision | None, Sequence[CellCommand]]:
    """Decide the events of a log again. Return how many agree, then the first that does not and its new commands.

    Raises ConfigError for a damaged log. A last line that a crash has cut is left out.
    """
    count = 0
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=CellLogHeader)
            router = CellRouter([Cell(name, weight) for name, weight in header.weights.items()], header.rules)
            decoder = msgspec.json.Decoder(CellDecision)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                decision = decoder.decode(line)
                commands = router.handle(decision.event)
                if commands != decision.commands:
                    return count, decision, commands
                count += 1
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is damaged after event {count}: {error}") from error
    return count, None, ()
