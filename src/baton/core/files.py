"""Read user-written files (TOML, YAML, JSON), with the file's name in every error message, and write private files."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec

from baton.core.errors import ConfigError

Form = Literal["toml", "yaml", "json"]


def placed(place: object, error: Exception) -> list[str]:
    """Return the lines of an error message, each prefixed with the name of its file or section."""
    return [f"{place}: {line}" for line in str(error).splitlines()]


@contextmanager
def in_file(path: object, what: str) -> Generator[None]:
    """Add a file's name to every error that the block raises.

    `what` describes the file in the message, such as `the cluster`. Raise ConfigError for a file that cannot be read,
    for invalid UTF-8, and for every ConfigError of the block.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot read {what}: {why}") from error
    except ConfigError as error:
        raise ConfigError("\n".join(placed(path, error))) from error


def form_of(path: Path) -> Form:
    """Return the format of a file by its suffix; TOML by default."""
    known: dict[str, Form] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
    return known.get(path.suffix, "toml")


def keys_of(text: str, form: Form, *, example: str) -> dict[str, Any]:
    """Decode text whose top level must be a table of keys. Raise ConfigError, which shows `example`, if it is not."""
    decode = {"toml": msgspec.toml.decode, "yaml": msgspec.yaml.decode, "json": msgspec.json.decode}[form]
    try:
        raw: object = decode(text)  # JSON has its own decoder, since YAML reads 1e1 as text
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a {form.upper()} file: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"it must be keys with values, such as {example}, but is {_kind(raw)}")
    return cast("dict[str, Any]", raw)


def _kind(raw: object) -> str:
    if raw is None:
        return "empty"
    return "a list" if isinstance(raw, list) else "a single value"


def output_problems(outputs: Mapping[str, Path | None]) -> list[str]:
    """Return an error for each output file that cannot be written. Call it before a run, so that no result is lost."""
    return [
        f"{flag} {path}: {path.parent} must be a folder that exists, and {path.name or path} a file in it"
        for flag, path in outputs.items()
        if path is not None and (path.is_dir() or not path.parent.is_dir())
    ]


def make_private_folder(folder: Path) -> None:
    """Create a folder, and its missing parents, in mode 0700. The mode of an existing folder stays."""
    for path in (*reversed(folder.parents), folder):
        if path == folder or not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, mode: Literal["ab", "wb"], buffering: int = DEFAULT_BUFFER_SIZE) -> BinaryIO:
    """Open a file for writing in mode 0600, whatever its mode was before."""
    return open(path, mode, buffering, opener=open_private_fd)


def open_private_fd(path: str | Path, flags: int) -> int:
    """Open a file, set its mode to 0600 and return its descriptor. Devices, pipes and others' files keep their mode."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        with suppress(OSError):
            os.fchmod(fd, 0o600)
    return fd
