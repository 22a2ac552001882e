"""Every route that generates nothing: models, tokens, health, metrics, the cluster, the page."""

from __future__ import annotations

from importlib import metadata, resources

from msgspec import Struct, json
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.core.errors import RequestError
from baton.core.types import WorkerId
from baton.serve.http.body import read_body
from baton.serve.http.file_chunks import file_chunks
from baton.serve.http.generate import check_model, not_ready
from baton.serve.http.prompts import Prompt, chat_prompt, off_loop
from baton.serve.http.services import Services
from baton.serve.http.wire.errors import RETRY_AFTER_S, ErrorBody, ErrorInfo
from baton.serve.http.wire.openapi import openapi_document
from baton.serve.http.wire.parsing import convert, parse_object
from baton.serve.http.wire.responses import Detokenized, Health, Model, ModelList, RoleSet, Tokens, Version
from baton.serve.http.wire.sampling import check_tokens
from baton.serve.http.wire.schemas import DetokenizeRequest, RoleRequest, TokenizeRequest
from baton.serve.live.metrics_registry import CONTENT_TYPE

PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
"""The page loads nothing, and talks to nobody but this server."""
LOG_TYPE = "application/octet-stream"
LOG_FULL_HEADER = "baton-log-full"
"""Of the decision log: `yes` where later decisions are not in it."""


class Pages:
    """Endpoints over the same services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._version = metadata.version("baton")
        self._openapi = json.encode(
            openapi_document(services.gateway.card, self._version, choices_max=services.settings.choices_max)
        )
        self._page = resources.files("baton.serve.http").joinpath("ui.html").read_bytes()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health),
            Route("/ready", self._health),
            Route("/metrics", self._metrics),
            Route("/cluster", self._cluster),
            Route("/cluster/log", self._log),
            Route("/cluster/workers/{worker}/role", self._set_role, methods=["POST"]),
            Route("/cluster/hosts", self._host_terms, methods=["POST"]),
            Route("/ui", self._ui),
            Route("/", self._home),
            Route("/favicon.ico", self._no_icon),
            Route("/openapi.json", self._document),
            Route("/version", self._show_version),
        ]

    async def _models(self, request: Request) -> Response:
        return _json(ModelList(data=[self._served()]))

    async def _model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._services.gateway.card.name)
        return _json(self._served())

    def _served(self) -> Model:
        return Model(
            id=self._services.gateway.card.name,
            created=self._services.started_unix_s,
            owned_by="baton",
            max_model_len=self._services.gateway.request_tokens_max,
        )

    async def _tokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        body = convert(parse_object(raw), TokenizeRequest)
        check_model(body.model, self._services.gateway.card.name)
        prompt = await off_loop(
            lambda: self._tokenized(body), size=len(raw), inline_max=self._services.settings.inline_bytes_max
        )
        most = self._services.gateway.request_tokens_max
        return _json(Tokens(tokens=prompt.tokens, count=len(prompt.tokens), max_model_len=most))

    def _tokenized(self, body: TokenizeRequest) -> Prompt:
        tokenizer = self._services.tokenizer
        if body.prompt is not None and body.messages is None:
            return Prompt(tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False), body.prompt)
        if body.messages is not None and body.prompt is None:
            return chat_prompt(body, tokenizer, self._services.template)
        raise RequestError("send either prompt or messages", param="prompt")

    async def _detokenize(self, request: Request) -> Response:
        raw = await self._body(request)
        body = convert(parse_object(raw), DetokenizeRequest)
        check_model(body.model, self._services.gateway.card.name)
        check_tokens(body.tokens, self._services.gateway.card.vocab_tokens, "tokens")
        text = await off_loop(
            lambda: self._services.tokenizer.decode(body.tokens, skip_special=False),
            size=len(raw),
            inline_max=self._services.settings.inline_bytes_max,
        )
        return _json(Detokenized(text))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._services.settings.body_bytes_max)

    async def _health(self, request: Request) -> Response:
        state = self._services.gateway.state
        if state == "ready":
            return _json(Health(state))
        body = ErrorBody(ErrorInfo(not_ready(self._services.gateway), "service_unavailable_error", None, "not_ready"))
        return _json(body, status=503, headers={"retry-after": f"{RETRY_AFTER_S:.0f}"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._services.render_metrics(), headers={"content-type": CONTENT_TYPE})

    async def _cluster(self, request: Request) -> Response:
        return _json(self._services.gateway.cluster())

    async def _log(self, request: Request) -> Response:
        """Send the decision log as far as it is written. Replaying it is the reader's work, not this server's."""
        log = self._services.gateway.decision_log
        if log is None:
            message = "this server keeps no decision log; start it with --log FILE"
            raise RequestError(message, status=404, code="no_decision_log")
        try:
            size_bytes = log.path.stat().st_size
        except OSError as error:
            message = f"the decision log cannot be read any more: {error.strerror}; restart the server to log again"
            raise RequestError(message, status=404, code="no_decision_log") from error
        headers = {"content-length": str(size_bytes), LOG_FULL_HEADER: "yes" if log.is_full else "no"}
        return StreamingResponse(file_chunks(log.path, size_bytes), media_type=LOG_TYPE, headers=headers)

    async def _set_role(self, request: Request) -> Response:
        body = convert(parse_object(await self._body(request)), RoleRequest)
        worker = request.path_params["worker"]
        self._services.gateway.set_role(WorkerId(worker), body.role)
        return _json(RoleSet(worker, body.role))

    async def _host_terms(self, request: Request) -> Response:
        """Tell a host how to join. Whoever may generate may also give a host."""
        return _json(await self._services.gateway.host_terms())

    async def _ui(self, request: Request) -> Response:
        headers = {"content-security-policy": PAGE_POLICY, "content-type": "text/html; charset=utf-8"}
        return Response(self._page, headers=headers)

    async def _home(self, request: Request) -> Response:
        """Show the page to whoever types the server's bare address into a browser."""
        return RedirectResponse("/ui")

    async def _no_icon(self, request: Request) -> Response:
        """Every browser asks for one; a 404 would stand in its console as an error."""
        return Response(status_code=204)

    async def _document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def _show_version(self, request: Request) -> Response:
        return _json(Version(self._version))


def _json(body: Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.encode(body), status_code=status, headers=headers, media_type="application/json")
