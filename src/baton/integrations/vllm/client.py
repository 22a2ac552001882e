"""The HTTP client of one vLLM server: read its properties and its load, and send requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from baton.integrations.vllm.wire import (
    ABORT,
    COMPLETIONS,
    GENERATE,
    Answer,
    Choice,
    EngineLoad,
    Generation,
    ServedModel,
    ServedModels,
    Tokens,
    Version,
    completions_body,
    error_text,
    event_data,
    generate_body,
    read_load,
)

_CONNECT_S = 5.0
_SILENT_STREAM_S = 300.0
"""A stream that sends no byte for this long counts as broken. Even a long prompt in a full queue takes less time."""
Body = TypeVar("Body")


class EngineBrokenError(Exception):
    """The server did not answer, or failed during the answer. The request may succeed if it is sent again."""


class EngineGoneError(EngineBrokenError):
    """No process listens at the server's address."""


class EngineRefusedError(Exception):
    """The server rejected the request as invalid. Sending it again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Properties of a server, read when it joins."""

    version: str
    model: str
    """Name of the server's base model."""
    context_tokens: int
    """Maximum tokens of a request. 0: not known."""
    has_generate: bool
    """Whether the server has `/inference/v1/generate`, which takes and returns token ids."""
    load: EngineLoad


class VllmServer:
    """The client of one vLLM server. Create it in the event loop."""

    def __init__(self, url: str, key: str, *, answer_s: float) -> None:
        """`key`: bearer key, empty if the server needs none. `answer_s`: deadline in seconds of all but generations."""
        self.url = url.rstrip("/")
        self._model = ""
        self._has_generate = True
        self._answer = aiohttp.ClientTimeout(total=answer_s, sock_connect=_CONNECT_S)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_STREAM_S),
        )

    async def close(self) -> None:
        await self._http.close()

    async def facts(self) -> EngineFacts:
        """Read the server's properties, which later requests need. Raises EngineBrokenError or EngineRefusedError."""
        version = (await self._get("/version", Version)).version
        model = _served_model(await self._get("/v1/models", ServedModels))
        self._model, self._has_generate = model.id, await self._takes_tokens()
        return EngineFacts(
            version=version,
            model=model.id,
            context_tokens=model.max_model_len or 0,
            has_generate=self._has_generate,
            load=await self.load(),
        )

    async def load(self) -> EngineLoad:
        """Return the load of the server. Raises EngineBrokenError or EngineRefusedError."""
        async with self._request("/metrics", limits=self._answer) as response:
            return read_load((await response.read()).decode(errors="replace"))

    async def tokenize(self, text: str) -> list[int] | None:
        """Return the server's token ids of a text. None: it has no tokenizer."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            async with self._request("/tokenize", body, self._answer) as response:
                return _decoded(await response.read(), Tokens).tokens
        except EngineRefusedError:
            return None

    async def stream(self, generation: Generation) -> AsyncGenerator[Choice]:
        """Yield tokens as the server generates them; the last choice has a finish reason.

        Raises EngineBrokenError if the stream ends before that, EngineRefusedError if the server rejects the request.
        """
        path, body = self._body(generation, stream=True)
        async with self._request(path, body) as response:
            async for line in response.content:
                data = event_data(line)
                if data is None:
                    continue
                answer = _decoded(data, Answer)
                if answer.error is not None:
                    raise EngineBrokenError(answer.error.message or "the stream has an error without a text")
                for choice in answer.choices:
                    yield choice

    async def prefill(self, generation: Generation) -> Answer:
        """Compute a prompt and keep its KV for another server. Raises as `stream` does."""
        path, body = self._body(generation, stream=False)
        async with self._request(path, body) as response:
            return _decoded(await response.read(), Answer)

    async def abort(self, generation_id: str) -> None:
        """Abort a request by its id, because the server may not notice that its connection was closed.

        Does nothing if the server has no route for that.
        """
        body = {"request_ids": [f"generate-tokens-{generation_id}"]}
        if self._has_generate:
            async with self._request(ABORT, body, self._answer):
                pass

    def _body(self, generation: Generation, *, stream: bool) -> tuple[str, dict[str, Any]]:
        if self._has_generate:
            return GENERATE, generate_body(generation, self._model, stream=stream)
        return COMPLETIONS, completions_body(generation, self._model, stream=stream)

    async def _takes_tokens(self) -> bool:
        """Return whether the server has `/inference/v1/generate`. If so, it rejects an empty body as invalid."""
        async with self._raw(GENERATE, {}, self._answer) as response:
            return response.status in (400, 422)

    async def _get(self, path: str, kind: type[Body]) -> Body:
        async with self._request(path, limits=self._answer) as response:
            return _decoded(await response.read(), kind)

    @asynccontextmanager
    async def _request(
        self, path: str, body: dict[str, Any] | None = None, limits: aiohttp.ClientTimeout | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request. Raises EngineRefusedError for a status from 400 to 499, else EngineBrokenError on failure."""
        async with self._raw(path, body, limits) as response:
            if response.status >= 400:
                text = f"{path} answered {response.status}: {error_text(await response.read())}"
                raise EngineRefusedError(text) if response.status < 500 else EngineBrokenError(text)
            yield response

    @asynccontextmanager
    async def _raw(
        self, path: str, body: dict[str, Any] | None, limits: aiohttp.ClientTimeout | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        method, allowed = "GET" if body is None else "POST", limits or self._http.timeout
        try:
            async with self._http.request(
                method, self.url + path, json=body, timeout=allowed, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineGoneError(f"{path}: {error}") from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:  # ValueError: a line is too long
            raise EngineBrokenError(f"{path}: {type(error).__name__}: {error}") from error


def _decoded(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise EngineBrokenError(f"an answer that is not understood: {error}: {data[:100]!r}") from error


def _served_model(served: ServedModels) -> ServedModel:
    """Return the base model of a server: the first model that is not an adapter, which would have a parent."""
    for model in served.data:
        if model.parent is None:
            return model
    raise EngineRefusedError(f"it serves no base model, only {[model.id for model in served.data]}")
