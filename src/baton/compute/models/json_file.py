"""Read the JSON files of a model. Every error names the file and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from baton.core.errors import ModelError

Wanted = TypeVar("Wanted")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes that are not JSON of the expected type, or that are nested too deep."""


def read_json(path: Path, wanted: type[Wanted]) -> Wanted:
    """Return the content of a file as a type. Raises ModelError if it cannot be read or has another type."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=wanted)
    except (OSError, *JSON_ERRORS) as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error
