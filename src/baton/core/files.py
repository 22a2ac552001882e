"""Files that a person wrote: their text as keys and values, and what is wrong with one said beside its name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from baton.core.errors import ConfigError

Form = Literal["toml", "yaml", "json"]


def placed(place: object, error: Exception) -> list[str]:
    """Say every problem of an error beside the place that it is about: a file, or a section of one."""
    return [f"{place}: {line}" for line in str(error).splitlines()]


@contextmanager
def in_file(path: object, what: str) -> Generator[None]:
    """Put a file's name beside whatever is found wrong with it meanwhile, on every line.

    `what`: what the file is read for, with its article, such as `the cluster`. Raises ConfigError for a file that
    cannot be read, for text that is none, and for every ConfigError of the block.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot read {what}: {why}") from error
    except ConfigError as error:
        raise ConfigError("\n".join(placed(path, error))) from error


def form_of(path: Path) -> Form:
    """Tell by its name how a file of keys and values is written: TOML, where the name says nothing else."""
    known: dict[str, Form] = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
    return known.get(path.suffix, "toml")


def keys_of(text: str, form: Form, *, example: str) -> dict[str, Any]:
    """Decode a file that has to be keys with values, such as `example`. Raises ConfigError where it is not."""
    decode = {"toml": msgspec.toml.decode, "yaml": msgspec.yaml.decode, "json": msgspec.json.decode}[form]
    try:
        raw: object = decode(text)  # JSON is not read as YAML: there, 1e1 is a word
    except msgspec.DecodeError as error:
        raise ConfigError(f"not a {form.upper()} file: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"it must be keys with values, such as {example}, but is {_kind(raw)}")
    return cast("dict[str, Any]", raw)


def _kind(raw: object) -> str:
    if raw is None:
        return "empty"
    return "a list" if isinstance(raw, list) else "a single value"
