"""The deadlines of an HTTP connection, and its end: uvicorn's httptools protocol with limits of time.

Uvicorn does not bound the time that a client takes. ADR 19 has the reasons and the alternatives.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from http import HTTPStatus
from typing import Any, Literal

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.core.errors import RequestError
from baton.move.clock import now_s
from baton.move.ipc.tls import ServerTls
from baton.serve.http.connections import Connections, client_address
from baton.serve.http.wire.errors import error_body, error_headers

LINGER_S = 2.0
"""Seconds that a client has to read an error response and close the connection. Then the server aborts it."""
LINGER_BYTES_MAX = 1 << 20
"""Maximum bytes that the server reads and drops during `LINGER_S`."""
_LINGER_NOT = struct.pack("ii", 1, 0)
"""Value of SO_LINGER that makes the kernel drop unsent data when the connection is closed."""
Phase = Literal["idle", "head", "body", "response", "closing"]


class HttpServerConfig(uvicorn.Config):
    """Uvicorn's settings for Baton's HTTP server, and the `Connections` that all protocol objects share."""

    def __init__(self, app: ASGIApp, connections: Connections, *, close_s: float, tls: ServerTls | None = None) -> None:
        """`close_s`: seconds for open connections to close when the server stops. `tls`: None serves plain HTTP."""
        proxies = connections.proxies
        super().__init__(
            app,
            http=HttpToolsProtocol,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
            timeout_graceful_shutdown=math.ceil(close_s),
        )
        self.connections = connections
        self.tls = tls


class TimedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection with deadlines. It answers a violation without the application, and then closes."""

    def __init__(
        self,
        config: HttpServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = ""
        self._all = config.connections
        self._limits = config.connections.limits
        self._phase: Phase = "idle"
        self._deadline_s = math.inf
        self._send_deadline_s = math.inf
        """Deadline for the client to read. Infinite: the send buffer is not full."""
        self._cycles: list[RequestResponseCycle] = []
        """Unanswered requests, in the order of their arrival."""

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = self._flow = HeldFlow(transport)
        self.address = client_address(self.client[0] if self.client else "")
        self._deadline_s = now_s() + self._limits.idle_s
        error = self._all.add(self)
        if error is not None:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._send_deadline_s = math.inf
        super().resume_writing()

    def end_if_overdue(self, now_s: float) -> None:
        """End the connection if the client is too slow to send its request, to read its response, or to close."""
        if self.flow.write_paused and self._send_deadline_s == math.inf:
            self._send_deadline_s = now_s + self._limits.send_s
        if self._phase == "body" and self.flow.read_paused and not self._flow.is_held:
            self._deadline_s = now_s + self._limits.body_s  # the server has stopped reading, so the client is not late
        if self.transport.is_closing() and self._phase != "closing":
            self._phase, self._deadline_s = "closing", now_s + self._limits.send_s  # the rest is being sent
        if now_s >= self._send_deadline_s:
            self._all.note_refused(self.address, _slow_reader(self._limits.send_s))
            self._reset()
        elif now_s < self._deadline_s:
            return
        elif self._phase == "closing":
            self._reset()
        elif self._phase == "head":
            self._refuse(_overdue("headers", "header_s", self._limits.header_s))
        elif self._phase == "body" and not self.cycle.response_complete:
            self._refuse(_overdue("body", "body_s", self._limits.body_s))
        else:
            self._close()

    @property
    def _is_closing(self) -> bool:
        return self._phase == "closing" or self.transport.is_closing()

    # ---- the end

    def _refuse(self, error: RequestError) -> None:
        """Answer the incomplete request with an error, unless an earlier request is unanswered. Then close."""
        self._all.note_refused(self.address, error)
        unanswered = [cycle for cycle in self._cycles if not _is_answered(cycle)]
        if self._phase == "body":
            may_answer = len(unanswered) == 1 and not self.cycle.response_started
        else:
            may_answer = not unanswered
        self._cancel()
        if not self._all.may_answer(self):
            self.transport.abort()
            return
        if may_answer:
            self.transport.write(_response(error))
        self._close()

    def _cancel(self) -> None:
        """Tell the application that the client of every unanswered request is gone."""
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()

    def _close(self) -> None:
        """Send the written data, and give the client `LINGER_S` seconds to read it before the connection is aborted."""
        self._phase, self._deadline_s = "closing", now_s() + LINGER_S
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _reset(self) -> None:
        """Abort the connection, and drop all unsent data, including data in the kernel's buffer."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()


class HeldFlow(FlowControl):
    """Flow control that does not read while received data waits to be parsed, even if the application wants more."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_held = False
        """Whether received data waits to be parsed. The deadline of the body still applies: such data is unusual."""
        self._is_wanted = True

    def pause_reading(self) -> None:
        self._is_wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_wanted = True
        if not self.is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Stop reading until `release`."""
        self.is_held = True
        super().pause_reading()

    def release(self) -> None:
        """Read again, unless the application has paused it."""
        self.is_held = False
        if self._is_wanted:
            super().resume_reading()


def _is_answered(cycle: RequestResponseCycle) -> bool:
    """Return whether a client has a whole response, even if the application has not yet ended it."""
    is_body_sent = cycle.chunked_encoding is False and cycle.expected_content_length == 0
    is_sent = is_body_sent or cycle.scope["method"] == "HEAD"
    return cycle.response_complete or (cycle.response_started and is_sent)


def _response(error: RequestError) -> bytes:
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error_headers(error),
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _overdue(part: str, setting: str, limit_s: float) -> RequestError:
    message = f"the {part} of the request took longer than {limit_s:g} s (limits.{setting}); send the request again"
    return RequestError(message, status=408, code="request_timeout")


def _slow_reader(limit_s: float) -> RequestError:
    message = f"it read too little of its response within {limit_s:g} s (limits.send_s); its request was cancelled"
    return RequestError(message, status=408, code="slow_reader")
