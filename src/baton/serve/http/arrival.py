"""The first thing that happens to a request: when it came, what it is called, who sent it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.core.errors import RequestError
from baton.move.clock import now_s
from baton.serve.http.auth import authenticate
from baton.serve.http.wire.errors import error_body, error_headers

OPEN_PATHS = frozenset({"/health", "/ready", "/ui", "/", "/favicon.ico"})
"""Answered without a key: probes, and a page that asks for the key itself."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_STATE_KEY = "baton.arrival"


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its body is read."""

    request_id: str
    """The client's X-Request-Id, or one of ours. Not unique: a client may send one twice."""
    at_s: float
    client: str
    """Name of the API key. Empty where none is needed."""


def arrival_of(scope: Scope) -> Arrival:
    """Get what `Entrance` noted."""
    return scope[_STATE_KEY]


class Entrance:
    """Outermost ASGI layer: stamps the arrival, checks the API key, echoes X-Request-Id on every answer."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        at_s = now_s()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        named_send = _naming(send, request_id)
        try:
            client = "" if scope["path"] in OPEN_PATHS else authenticate(headers, self._api_keys)
        except RequestError as error:
            await send_error(named_send, error)
            return
        scope[_STATE_KEY] = Arrival(request_id, at_s, client)
        await self._app(scope, receive, named_send)


def _request_id(sent: bytes) -> str:
    """Take the client's id if it is short and harmless in a log, else make one."""
    return sent.decode() if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def _naming(send: Send, request_id: str) -> Send:
    header = (b"x-request-id", request_id.encode())

    async def named_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return named_send


async def send_error(send: Send, error: RequestError, extra_headers: Mapping[str, str] | None = None) -> None:
    """Answer with OpenAI's error body."""
    headers = {"content-type": "application/json", **error_headers(error), **(extra_headers or {})}
    await send_bytes(send, error_body(error), status=error.status, headers=headers)


async def send_bytes(send: Send, body: bytes, *, status: int, headers: Mapping[str, str]) -> None:
    """Answer with one body."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
