"""The routes that generate no output: models, tokenization, health, metrics, the cluster and its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from baton.core.errors import RequestError
from baton.serve.http.body_threads import ReceivedBody
from baton.serve.http.edge import check_content_type, context_of, read_body
from baton.serve.http.model_services import ModelServices
from baton.serve.http.paging import asked_count
from baton.serve.http.prompts import Prompt, chat_prompt
from baton.serve.http.services import Services
from baton.serve.http.unknown_fields import warning_headers
from baton.serve.http.wire.errors import RETRY_AFTER_S, ErrorBody, ErrorInfo
from baton.serve.http.wire.openapi import openapi_document
from baton.serve.http.wire.responses import (
    Detokenized,
    Health,
    Model,
    ModelList,
    TokenizerInfo,
    Tokens,
    Version,
)
from baton.serve.http.wire.sampling import check_tokens
from baton.serve.http.wire.schemas import DetokenizeRequest, TokenizeRequest
from baton.serve.live.history import KEPT_SAMPLES, History
from baton.serve.live.log_thread import LogThread
from baton.serve.live.metrics_registry import CONTENT_TYPE

LOG_TYPE = "application/octet-stream"
LOG_FULL_HEADER = "baton-log-full"
"""Header of the decision log: `yes` if the log is full, so that later decisions are missing."""
CHUNK_BYTES = 1 << 18
EVENTS_TYPE = "text/event-stream"
READERS_MAX = 32
"""Maximum clients of /cluster/events. Up to 15 minutes of samples may wait in the buffers of each."""


class Pages:
    """The endpoints of all routes that generate no output."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._version = metadata.version("baton")
        self._openapi = json.encode(
            openapi_document(
                services.model(None).gateway.card,
                self._version,
                choices_max=services.settings.choices_max,
                is_strict=services.settings.strict_api,
            )
        )
        self._readers = 0
        """Number of clients that read /cluster/events."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ready", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/metrics", self._metrics),
            Route("/cluster", self._cluster),
            Route("/cluster/log", self._log),
            Route("/cluster/events", self._events),
            Route("/cluster/hosts", self._host_terms, methods=["POST"]),
            Route("/openapi.json", self._document),
            Route("/version", self._show_version),
        ]

    async def _models(self, request: Request) -> Response:
        models = [self._served(model, name) for name, model in self._services.models.items()]
        return json_response(ModelList(data=models))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_response(self._served(self._services.model(name), name))

    def _served(self, model: ModelServices, name: str) -> Model:
        return Model(
            id=name,
            created=self._services.started_unix_s,
            owned_by="baton",
            max_model_len=model.gateway.request_tokens_max,
        )

    async def _tokenize(self, request: Request) -> Response:
        received = await self._body(request)
        body, ignored = await self._services.read(received, TokenizeRequest)
        model = self._services.model(body.model)
        prompt = await model.tokenize(lambda: _tokenized(body, model), received)
        most = model.gateway.request_tokens_max
        tokens = Tokens(tokens=prompt.tokens, count=len(prompt.tokens), max_model_len=most)
        return json_response(tokens, headers=warning_headers(ignored))

    async def _detokenize(self, request: Request) -> Response:
        received = await self._body(request)
        body, ignored = await self._services.read(received, DetokenizeRequest)
        model = self._services.model(body.model)
        text = await model.tokenize(lambda: _detokenized(body, model), received)
        return json_response(Detokenized(text), headers=warning_headers(ignored))

    async def _tokenizer_info(self, request: Request) -> Response:
        model = asked_model(self._services, request)
        card, text = model.gateway.card, model.tokenizer.token_text
        info = TokenizerInfo(
            bos_token=None if card.bos_token_id is None else text(card.bos_token_id),
            eos_token=text(card.eos_token_ids[0]) if card.eos_token_ids else None,
            model_max_length=model.gateway.request_tokens_max,
        )
        return json_response(info)

    async def _body(self, request: Request) -> ReceivedBody:
        return await read_body(request.scope, request.receive, self._services.body_limit)

    async def _health(self, request: Request) -> Response:
        model = self._services.health()
        if model.gateway.state == "ready":
            return json_response(Health(model.gateway.state))
        body = ErrorBody(ErrorInfo(model.not_ready(), "service_unavailable_error", None, "not_ready"))
        return json_response(body, status=503, headers={"retry-after": f"{RETRY_AFTER_S:.0f}"})

    async def _metrics(self, request: Request) -> Response:
        is_admin = "admin" in context_of(request.scope).identity.scopes
        text = self._services.render_metrics(with_tenants=is_admin)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _cluster(self, request: Request) -> Response:
        return json_response(asked_model(self._services, request).gateway.cluster())

    async def _log(self, request: Request) -> Response:
        """Send the decision log up to the last decision."""
        log = asked_model(self._services, request).gateway.decision_log
        if log is None:
            message = "this server keeps no decision log; start it with --log FILE"
            raise RequestError(message, status=404, code="no_decision_log")
        try:
            sizes = await asyncio.to_thread(log.sizes)
        except OSError as error:
            message = f"the decision log cannot be read anymore: {error.strerror}; restart the server to log again"
            raise RequestError(message, status=404, code="no_decision_log") from error
        headers = {"content-length": str(sum(sizes)), LOG_FULL_HEADER: "yes" if log.full else "no"}
        return StreamingResponse(_log_chunks(log, sizes), media_type=LOG_TYPE, headers=headers)

    async def _events(self, request: Request) -> Response:
        """Send the samples of the last 15 minutes, then a new one every second, as server-sent events.

        The query `samples` lowers the number of past samples.
        """
        if self._readers >= READERS_MAX:
            message = f"{READERS_MAX} clients read /cluster/events already; close a dashboard"
            raise RequestError(message, status=503, code="too_many_readers")
        headers = {"cache-control": "no-store"}
        history = asked_model(self._services, request).history
        past_samples = asked_count(request, "samples", KEPT_SAMPLES, KEPT_SAMPLES)
        if request.method == "HEAD":  # an endless response would occupy its connection forever
            return Response(headers=headers, media_type=EVENTS_TYPE)
        return StreamingResponse(self._event_stream(history, past_samples), media_type=EVENTS_TYPE, headers=headers)

    async def _event_stream(self, history: History, past_samples: int) -> AsyncIterator[bytes]:
        self._readers += 1
        try:
            async for message in history.follow(past_samples):
                yield b"data: " + message + b"\n\n"
        finally:
            self._readers -= 1

    async def _host_terms(self, request: Request) -> Response:
        """Return the terms for a host to join."""
        check_content_type(dict(request.scope["headers"]))
        return json_response(await asked_model(self._services, request).hosts.terms())

    async def _document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _show_version(self, request: Request) -> Response:
        return json_response(Version(self._version))


def asked_model(services: Services, request: Request) -> ModelServices:
    """Return the model that the query names, as in `?model=NAME`, or else the first. Raises RequestError (404)."""
    return services.model(request.query_params.get("model"))


def _tokenized(body: TokenizeRequest, model: ModelServices) -> Prompt:
    match body:
        case TokenizeRequest(prompt=str(text), content=None, messages=None):
            param = "prompt"
        case TokenizeRequest(prompt=None, content=str(text), messages=None):
            param = "content"
        case TokenizeRequest(prompt=None, content=None, messages=list()):
            return chat_prompt(body, model.texts, model.template)
        case _:
            raise RequestError("send one of prompt, content and messages", param="prompt")
    return Prompt(model.texts.encode(text, param, add_special=body.add_special_tokens is not False), text)


def _detokenized(body: DetokenizeRequest, model: ModelServices) -> str:
    check_tokens(body.tokens, model.gateway.card.vocab_tokens, "tokens")
    return model.tokenizer.decode(body.tokens, skip_special=False)


def json_response(body: Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a struct as its JSON body."""
    return Response(json.encode(body), status_code=status, headers=headers, media_type="application/json")


async def file_chunks(path: Path, size_bytes: int) -> AsyncIterator[bytes]:
    """Yield the first `size_bytes` of a file that may be growing. A thread reads it, to not delay other streams.

    Only one chunk is in memory at a time, even if the client reads slowly.
    """
    async with aclosing(_chunks(await asyncio.to_thread(path.open, "rb"), size_bytes)) as chunks:
        async for chunk in chunks:
            yield chunk


async def _log_chunks(log: LogThread, sizes: Sequence[int]) -> AsyncIterator[bytes]:
    """Yield the first bytes of each file of a log, as many as `sizes` has."""
    for index, size_bytes in enumerate(sizes):
        async with aclosing(_chunks(await asyncio.to_thread(log.open_file, index), size_bytes)) as chunks:
            async for chunk in chunks:
                yield chunk


async def _chunks(file: BinaryIO, size_bytes: int) -> AsyncGenerator[bytes]:
    try:
        left_bytes = size_bytes
        while left_bytes and (chunk := await asyncio.to_thread(file.read, min(left_bytes, CHUNK_BYTES))):
            left_bytes -= len(chunk)
            yield chunk
    finally:
        file.close()
