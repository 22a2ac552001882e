"""Read a request's body within a bound."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Scope

from baton.core.errors import RequestError


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """Return the body of a JSON request.

    Refuses by the announced length before a byte is read, or as soon as more than `bytes_max` have come. Raises
    RequestError (413, 415) and ClientGone.
    """
    headers = dict(scope["headers"])
    _check_type(headers)
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > bytes_max:
        raise _too_large(int(announced), bytes_max)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > bytes_max:
            raise _too_large(size, bytes_max)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if kind != b"application/json":
        got = kind.decode("latin-1")
        raise RequestError(f"send the body as Content-Type: application/json, got {got!r}", status=415)
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding != b"identity":
        got = coding.decode("latin-1")
        raise RequestError(f"send the body without Content-Encoding, got {got!r}", status=415)


def _too_large(size: int, bytes_max: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes or more, this server takes at most {bytes_max}; send fewer or shorter prompts",
        status=413,
        code="body_too_large",
    )
