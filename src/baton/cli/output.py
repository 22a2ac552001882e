"""Write files, JSON and tables, and warn on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console

from baton.core.errors import ConfigError
from baton.core.files import open_private

WIDTH = 120
"""Width of tables in characters if the output is not a terminal."""

STANDARD_OUTPUT = Path("-")
"""The file of `--json -`: standard output, which then has nothing but the JSON."""


def warn(remarks: Iterable[str]) -> None:
    """Print remarks on standard error, so that standard output stays readable by programs."""
    for remark in remarks:
        print(f"baton: {remark}", file=sys.stderr)  # noqa: T201


def write_file(path: Path, content: bytes, *, otherwise: str = "choose another file") -> None:
    """Write a file in mode 0600. Raises ConfigError, whose message ends with `otherwise`, if that fails."""
    try:
        with open_private(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {otherwise}") from error


def json_text(value: object) -> str:
    """Return a struct as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def write_json(path: Path, value: object, *, otherwise: str = "choose another file") -> None:
    """Write a struct as indented JSON; `-` is standard output. Raises ConfigError if the file cannot be written."""
    if path == STANDARD_OUTPUT:
        print(json_text(value))  # noqa: T201
        return
    write_file(path, f"{json_text(value)}\n".encode(), otherwise=otherwise)


def wide_console() -> Console:
    """Return a console of the terminal's width; for a pipe or a file, one that is wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDTH))
