"""The outermost ASGI layer, which identifies clients and adds headers, and functions for bodies and disconnects."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.core.errors import RequestError
from baton.core.keys import Scope as KeyScope
from baton.move.clock import now_s
from baton.serve.http.body_threads import ReceivedBody
from baton.serve.http.browser import BrowserRules
from baton.serve.http.budgets import Budgets, RequestBudget
from baton.serve.http.connections import client_address
from baton.serve.http.identity import Identity, Keyring, check_port, check_scope, needed_scope
from baton.serve.http.site import STATIC
from baton.serve.http.slo import header_slo
from baton.serve.http.wire.errors import error_body, error_headers
from baton.serve.http.wire.parsing import parse_object
from baton.serve.http.wire.schemas import SloFields
from baton.serve.live.recorder import Recorder

if TYPE_CHECKING:  # the extra `otel` may be missing
    from baton.serve.http.telemetry import RequestTrace

log = logging.getLogger("baton.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/ui", "/", "/chat", "/docs", "/favicon.ico"})
"""Paths that need no API key: the probes, and the web pages, which ask the user for the key."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STATE_KEY = "baton.context"
_CSP = b"content-security-policy"
_SAFE_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))
"""Headers of every response. With them, foreign pages cannot embed it, and browsers do not guess another type."""
_CLOSED_HEADERS = (*_SAFE_HEADERS, (_CSP, b"default-src 'none'; frame-ancestors 'none'"))
"""The same, and the Content-Security-Policy of every response for which a route sets none."""
Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed the connection before its body was complete."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The properties of an HTTP request that are known before its body is read."""

    request_id: str
    """The client's X-Request-Id, or a new one. Not unique: a client may send one twice."""
    arrived_at_s: float
    identity: Identity
    """Rights of the client, found by its API key."""
    client: str
    """Name of the client's key, or its address if it has none. Usage is counted for each name."""
    budget: RequestBudget
    slo: SloFields
    """SLO from the request's headers."""
    path: str
    headers: Mapping[bytes, bytes]
    is_offline: bool = False
    """The request belongs to a batch: the server's SLO does not apply, and its priority is below all others."""
    trace: RequestTrace | None = None
    """None: the server makes no traces."""

    @property
    def traceparent(self) -> str:
        """Return the header with which another server goes on with the trace. Empty: there is no trace."""
        if self.trace is not None:
            return self.trace.traceparent
        sent = self.headers.get(b"traceparent", b"")
        return sent.decode() if _TRACEPARENT.fullmatch(sent) else ""


def context_of(scope: Scope) -> RequestContext:
    """Return the context that `Edge` stored in the scope."""
    return scope[_STATE_KEY]


def with_context(scope: Scope, context: RequestContext) -> Scope:
    """Return a copy of the scope with another context."""
    return {**scope, _STATE_KEY: context}


def context_scope(context: RequestContext) -> Scope:
    """Return the scope of a POST request that the server itself makes."""
    headers = list(context.headers.items())
    return {"type": "http", "method": "POST", "path": context.path, "headers": headers, _STATE_KEY: context}


class Edge:
    """Outermost ASGI layer: arrival time, rules against foreign pages, API keys, and the headers of every response."""

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        rules: BrowserRules,
        budgets: Budgets,
        recorder: Recorder,
        *,
        admin_port: int = 0,
    ) -> None:
        """`admin_port`: the only port that serves the routes of the scopes `admin` and `join`. 0: every port does."""
        self._app = app
        self._admin_port = admin_port
        self._recorder = recorder
        self._budgets = budgets
        self._keyring = keyring
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived_at_s = now_s()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        send_with_headers = _add_headers(send, request_id)
        if log.isEnabledFor(logging.INFO):
            send_with_headers = _log_response(send_with_headers, scope, request_id, arrived_at_s)
        try:
            self._rules.check(scope["method"], scope["headers"], headers)
            needed = needed_scope(scope["method"], scope["path"])
            identity = self._identify(scope, headers, needed)
            slo = header_slo(headers)
            peer = scope.get("client")
            client = identity.key or client_address(peer[0] if peer else "")
            is_counted = needed == "generate"
            budget = self._budgets.begin(client, identity.limits, is_counted=is_counted, now_s=arrived_at_s)
        except RequestError as error:
            self._recorder.refused(error.status, error.code)
            await _send_error(send_with_headers, error, scope["path"])
            return
        path = scope["path"]
        scope[_STATE_KEY] = RequestContext(request_id, arrived_at_s, identity, client, budget, slo, path, headers)
        try:
            if scope["method"] != "POST":  # a POST waits for its turn once its body is there
                await budget.take_turn()
            await self._app(scope, receive, send_with_headers)
        finally:
            budget.end()

    def _identify(self, scope: Scope, headers: Mapping[bytes, bytes], needed: KeyScope | None) -> Identity:
        """Return the client's identity. Raises RequestError (401, 403) if the client may not use the route.

        `needed`: the scope that the route needs.
        """
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(STATIC):
            return Identity()
        if self._admin_port:
            check_port(needed, scope["path"], scope["server"][1], self._admin_port)
        identity = self._keyring.identify(headers)
        check_scope(identity, needed, scope["path"])
        return identity


def _request_id(sent: bytes) -> str:
    """Return the client's X-Request-Id if it is short and safe to log, else a new id."""
    return sent.decode() if sent and _REQUEST_ID.fullmatch(sent) else os.urandom(16).hex()


def _log_response(send: Send, scope: Scope, request_id: str, arrived_at_s: float) -> Send:
    """Return a `send` that writes a line to the log when the response begins."""

    def send_and_log(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": message["status"],
                "response_s": now_s() - arrived_at_s,
            }
            log.info("response", extra={"fields": fields})
        return send(message)

    return send_and_log


def _add_headers(send: Send, request_id: str) -> Send:
    """Return a `send` that adds the request id and the security headers for browsers to the response."""
    id_header = (b"x-request-id", request_id.encode())

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            own = message.get("headers", ())
            message["headers"] = [*own, id_header, *(_SAFE_HEADERS if _CSP in dict(own) else _CLOSED_HEADERS)]
        return send(message)

    return send_with_headers


# ---- bodies


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The size limit of a body, and its media type."""

    bytes_max: int
    setting: str = "http.body_bytes_max"
    """The setting that raises the limit. Empty: the limit is fixed."""
    kind: str = "application/json"


SMALL_BODY = BodyLimit(1 << 16, setting="")
"""The limit for routes that take a few names."""


async def read_body(scope: Scope, receive: Receive, limit: BodyLimit) -> ReceivedBody:
    """Return the body of a request. Raises RequestError (413, 415, 429, 503) and ClientDisconnected.

    A body above the limit is rejected before it is read if it has a Content-Length, else while it is read. Of many
    bodies that are complete at once, one is returned in each round of the event loop.
    """
    headers = dict(scope["headers"])
    check_content_type(headers, limit.kind)
    content_length = headers.get(b"content-length", b"")
    if content_length.isdigit() and int(content_length) > limit.bytes_max:
        raise too_large(int(content_length), limit)
    parts: list[bytes] = []
    size, budget = 0, context_of(scope).budget
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit.bytes_max:
            raise too_large(size, limit)
        budget.take_bytes(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            await budget.take_turn()
            return ReceivedBody(b"".join(parts), budget.client_number)


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object in the body of a request that takes a few names. Raises RequestError."""
    return parse_object((await read_body(request.scope, request.receive, SMALL_BODY)).raw)


def check_content_type(headers: Mapping[bytes, bytes], kind: str = "application/json") -> None:
    """Raise RequestError (415) if the Content-Type is not `kind` or the body is compressed.

    A foreign page can send bodies of other types, or without a type, without a CORS preflight.
    """
    sent = headers.get(b"content-type", b"").decode("latin-1")
    if sent != kind and (media_type := sent.split(";")[0].strip().lower()) != kind:
        got = repr(media_type) if media_type else "none"
        raise RequestError(f"send the body as Content-Type: {kind}, got {got}", status=415)
    coding = headers.get(b"content-encoding")
    if coding is not None and (name := coding.strip().lower().decode("latin-1")) != "identity":
        raise RequestError(f"send the body without Content-Encoding, got {name!r}", status=415)


def too_large(size: int, limit: BodyLimit) -> RequestError:
    """Return the error (413) for a body of `size` bytes or more."""
    setting = f" ({limit.setting}); send a smaller one" if limit.setting else " at this path; send a smaller one"
    message = f"the body has {size} bytes or more, at most {limit.bytes_max} are allowed{setting}"
    return RequestError(message, status=413, code="body_too_large")


async def _send_error(send: Send, error: RequestError, path: str) -> None:
    headers = {"content-type": "application/json", **error_headers(error)}
    await send_bytes(send, error_body(error, path), status=error.status, headers=headers)


async def send_bytes(send: Send, body: bytes, *, status: int, headers: Mapping[str, str]) -> None:
    """Send a response that is not streamed."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


# ---- concurrency


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_all(works: Sequence[Awaitable[Result]]) -> list[Result]:
    """Run all awaitables concurrently and return their results. The first error cancels the others and is raised."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_as_coroutine(work)) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _as_coroutine(work: Awaitable[Result]) -> Result:
    return await work
