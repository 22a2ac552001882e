"""Ignore the fields of a body that Baton does not know, and tell the client and the operator."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from starlette.types import Message, Send

from baton.core.validation import did_you_mean
from baton.serve.http.wire.parsing import UnknownFieldError, without_unknown_fields

log = logging.getLogger("baton.server")
Made = TypeVar("Made")
NAMES_LOGGED_MAX = 256
"""Maximum unknown names that the log mentions, and maximum names of one body that are checked. Clients choose them."""
NAMES_SHOWN_MAX = 8
"""Names in one header."""
NAME_CHARS_MAX = 60
_UNSAFE = re.compile(r'[^\x20-\x7e]|["\\]')
_INDEX = re.compile(r"\[\d+\]")


class UnknownFields:
    """Reads bodies with unknown fields, unless the API is strict."""

    def __init__(self, *, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def read(
        self, body: dict[str, Any], into: type[Struct], read: Callable[[dict[str, Any]], Made]
    ) -> tuple[Made, list[str]]:
        """Return what `read` makes of a body, and the fields that it ignored.

        Raises RequestError (400) for another problem, and for unknown fields if the API is strict.
        """
        try:
            return read(body), []
        except UnknownFieldError:
            if self._is_strict:
                raise
        known, ignored = without_unknown_fields(body, into)
        made = read(known)
        self._log([_INDEX.sub("", path) for path in ignored[:NAMES_LOGGED_MAX]], into)
        return made, ignored

    def _log(self, names: Sequence[str], into: type[Struct]) -> None:
        for name in map(_shown, names):
            if name in self._logged or len(self._logged) >= NAMES_LOGGED_MAX:
                continue
            self._logged.add(name)
            hint = "" if "." in name else did_you_mean(name, into.__struct_fields__)
            log.warning("requests have the unknown field %s%s: it is ignored; --strict-api rejects it", name, hint)


def send_warning(send: Send, ignored: Sequence[str]) -> Send:
    """Return a `send` that names ignored fields in the header `Warning` of the response."""
    if not ignored:
        return send
    value = _warning(ignored).encode()

    async def send_with_warning(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"warning", value)]
        await send(message)

    return send_with_warning


def warning_headers(ignored: Sequence[str]) -> dict[str, str] | None:
    """Return the headers that name ignored fields, None without ignored fields."""
    return {"warning": _warning(ignored)} if ignored else None


def _warning(ignored: Sequence[str]) -> str:
    """Return the value of the header `Warning` that names ignored fields."""
    more = f" and {len(ignored) - NAMES_SHOWN_MAX} more" if len(ignored) > NAMES_SHOWN_MAX else ""
    names = ", ".join(map(_shown, ignored[:NAMES_SHOWN_MAX]))
    return f'299 - "unknown fields were ignored: {names}{more}"'


def _shown(name: str) -> str:
    """Return a name that is safe in a header and in a log: ASCII without quotes, and short."""
    return _UNSAFE.sub("?", name[:NAME_CHARS_MAX])
