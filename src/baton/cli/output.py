"""What commands write for their reader: files, JSON, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from baton.core.errors import ConfigError

WIDTH = 120
"""Characters of a line where nobody says how many fit."""

STANDARD_OUTPUT = Path("-")
"""What `--json -` names: the JSON is then all that is printed there."""


def warn(remarks: Iterable[str]) -> None:
    """Tell what the reader should know, beside what a program may read."""
    for remark in remarks:
        print(f"baton: {remark}", file=sys.stderr)  # noqa: T201


def output_problems(outputs: Mapping[str, Path | None]) -> list[str]:
    """Say of the files that flags name why they cannot be written, before the work that would be lost."""
    return [
        f"{flag} {path}: {path.parent} must be a folder that exists, and {path.name or path} a file in it"
        for flag, path in outputs.items()
        if path is not None and (path.is_dir() or not path.parent.is_dir())
    ]


def write_file(path: Path, content: bytes, *, otherwise: str = "choose another file") -> None:
    """Raises ConfigError where the file cannot be written, with what to do `otherwise`."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; {otherwise}") from error


def json_text(value: object) -> str:
    """A struct as JSON that a person can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def write_json(path: Path, value: object, *, otherwise: str = "choose another file") -> None:
    """Write a struct, readable; `-` is standard output. Raises ConfigError where the file cannot be written."""
    if path == STANDARD_OUTPUT:
        print(json_text(value))  # noqa: T201
        return
    write_file(path, f"{json_text(value)}\n".encode(), otherwise=otherwise)


def wide_console() -> Console:
    """A terminal as wide as it is; a pipe or a file as wide as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, WIDTH))
