"""HTTP requests to a server of another engine, with their failures as the errors of the port."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from math import isfinite
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from baton.integrations.engines.port import EngineBrokenError, EngineGoneError, EngineRefusedError
from baton.move.ipc.breakable import BreakableTasks

_CONNECT_S = 5.0
_SILENT_STREAM_S = 300.0
"""A stream that sends no byte for this long counts as broken. Even a long prompt in a full queue takes less time."""
_LINE_BYTES_MAX = 2 * 1024 * 1024
"""Longest event of a stream. SGLang repeats all tokens so far in each event: this is enough for about 200,000."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Body = TypeVar("Body")


class ErrorInfo(Struct, frozen=True):
    message: str = ""


class ErrorAnswer(Struct, frozen=True):
    """The body of an error: an object as in OpenAI's API, a text, or the message itself."""

    error: ErrorInfo | str | None = None
    message: str = ""


class ServedModel(Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    parent: str | None = None
    """The base model of an adapter."""


class ServedModels(Struct, frozen=True):
    """The answer of /v1/models."""

    data: list[ServedModel] = []


class Tokens(Struct, frozen=True):
    """The answer of /tokenize."""

    tokens: list[int] | None = None


class EngineHttp:
    """The HTTP connections to one server. Create it in the event loop."""

    def __init__(self, url: str, key: str, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of short requests."""
        self.url = url.rstrip("/")
        self.short = aiohttp.ClientTimeout(total=answer_s, sock_connect=_CONNECT_S)
        """Limits of requests other than generations."""
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = _session(self._headers)
        self._requests = BreakableTasks()

    async def disconnect(self) -> None:
        """Break all requests under way. Later ones get new connections."""
        self._requests.break_all()
        session, self._session = self._session, _session(self._headers)
        await session.close()

    async def close(self) -> None:
        await self._session.close()

    async def get(self, path: str, kind: type[Body]) -> Body:
        """Return the decoded answer to a GET request."""
        async with self.request(path, limits=self.short) as response:
            return decoded(await response.read(), kind)

    async def served_model(self) -> ServedModel:
        """Return the first model of /v1/models that is not an adapter, which would have a parent."""
        served = await self.get("/v1/models", ServedModels)
        for model in served.data:
            if model.parent is None:
                return model
        raise EngineRefusedError(f"it serves no base model, only {[model.id for model in served.data]}")

    async def metrics(self) -> str:
        async with self.request("/metrics", limits=self.short) as response:
            return (await response.read()).decode(errors="replace")

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """Return the token ids that /tokenize answers. None: the server has no such route, or no tokenizer."""
        try:
            async with self.request("/tokenize", body, self.short) as response:
                return decoded(await response.read(), Tokens).tokens
        except EngineRefusedError:
            return None

    @asynccontextmanager
    async def request(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        limits: aiohttp.ClientTimeout | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request. Raises EngineRefusedError for a status from 400 to 499, else EngineBrokenError on failure.

        429 is a failure, because the server may take the request a moment later.
        """
        async with self.raw(path, body, limits, traceparent) as response:
            if response.status >= 400:
                text = f"{path} answered {response.status}: {error_text(await response.read())}"
                is_invalid = response.status < 500 and response.status != 429
                raise EngineRefusedError(text) if is_invalid else EngineBrokenError(text)
            yield response

    @asynccontextmanager
    async def raw(
        self, path: str, body: dict[str, Any] | None, limits: aiohttp.ClientTimeout | None, traceparent: str = ""
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request, and return the response with any status. Raises EngineBrokenError without one.

        `traceparent`: header with which the server goes on with a trace. Empty: there is none.
        """
        headers = {"traceparent": traceparent} if traceparent else {}
        method, allowed = "GET" if body is None else "POST", limits or self._session.timeout
        if self._session.closed:
            raise EngineGoneError(f"{path}: Baton has closed its connections to this server")
        try:
            async with (
                self._requests.block(),
                self._session.request(
                    method, self.url + path, json=body, headers=headers, timeout=allowed, allow_redirects=False
                ) as response,
            ):
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineGoneError(f"{path}: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: a line is too long
            raise EngineBrokenError(f"{path}: {type(error).__name__}: {error}") from error


def _session(headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_STREAM_S),
        read_bufsize=_LINE_BYTES_MAX // 2,  # aiohttp refuses lines of twice this size
    )


def decoded(data: bytes, kind: type[Body]) -> Body:
    """Decode an answer. Raises EngineBrokenError if it is of another form."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineBrokenError(f"an answer that is not understood: {error}: {data[:100]!r}") from error


def samples(metrics: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, the labels and the value of each sample whose name begins with `prefix`, or of the start time.

    Values that are no finite numbers are left out.
    """
    for name, labels, value in _pattern(prefix).findall(metrics):
        with suppress(ValueError):
            if isfinite(number := float(value)):
                yield name, dict(_LABEL.findall(labels)), number


@cache
def _pattern(prefix: str) -> re.Pattern[str]:
    """Return the pattern of a line in Prometheus' text format."""
    return re.compile(rf"^({prefix}[a-z_]+|process_start_time_seconds)(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)


def event_data(line: bytes) -> bytes | None:
    """Return the data in a line of server-sent events. None: the line has none, or marks the end of the stream."""
    data = line[5:].strip() if line.startswith(b"data:") else b""
    return data if data and data != b"[DONE]" else None


def error_text(body: bytes) -> str:
    """Return the message in an error response, as one line of at most 300 characters."""
    try:
        answer = msgspec.json.decode(body, type=ErrorAnswer)
        text = answer.error.message if isinstance(answer.error, ErrorInfo) else answer.error or answer.message
    except msgspec.DecodeError:
        text = ""
    return " ".join((text or body.decode(errors="replace")).split())[:300] or "an empty body"
