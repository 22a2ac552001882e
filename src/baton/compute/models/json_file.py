"""Read the JSON and text files of a model. Every error names the file and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from baton.core.errors import ModelError

Wanted = TypeVar("Wanted")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are not JSON of the expected type, or that are nested too deeply."""


JSON_BYTES_MAX = 32 << 20
"""Maximum size of a JSON file: twice that of the largest known index of shards.

Parsed values take up to twenty times the memory of their text.
"""


def read_json(path: Path, wanted: type[Wanted], *, bytes_max: int = JSON_BYTES_MAX) -> Wanted:
    """Return the content of a file as a type. Raises ModelError if it is unreadable, too large or of another type."""
    try:
        return msgspec.json.decode(read_bounded(path, bytes_max), type=wanted)
    except JSON_ERRORS as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Return the content of a file. Raises ModelError if it is unreadable or too large."""
    try:
        if path.stat().st_size > bytes_max or not path.is_file():
            raise ModelError(f"{path} is not a file of at most {bytes_max} bytes; download it again")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error
