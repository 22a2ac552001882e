"""Output of the commands: files, JSON, and warnings on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from baton.core.errors import ConfigError
from baton.core.files import open_private

STANDARD_OUTPUT = Path("-")
"""Path that means standard output, as in `--json -`. The output then consists of the JSON only."""


def warn(remarks: Iterable[str]) -> None:
    """Print warnings on standard error, so that programs can parse standard output."""
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
