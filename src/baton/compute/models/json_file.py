"""Read a model's JSON files: whatever is wrong with one, the error names the file and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from baton.core.errors import ModelError

Wanted = TypeVar("Wanted")

JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)
"""What msgspec raises for bytes that are not the JSON it was asked for."""


def read_json(path: Path, wanted: type[Wanted]) -> Wanted:
    """Decode a file into a type. Raises ModelError if it cannot be read or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=wanted)
    except (OSError, *JSON_ERRORS) as error:
        raise ModelError(f"cannot read {path}: {error}; download it again") from error
