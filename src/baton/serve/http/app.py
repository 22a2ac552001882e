"""The HTTP application: routes, and how every error becomes OpenAI's error body."""

from __future__ import annotations

import random
from collections.abc import Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.compute.models.chat_template import ChatTemplate
from baton.compute.models.tokenizer import Tokenizer
from baton.core.errors import RequestError
from baton.move.clock import unix_s
from baton.serve.http.arrival import Entrance
from baton.serve.http.body import ClientGone
from baton.serve.http.embed import EMBEDDINGS_PATH, Embed
from baton.serve.http.generate import Generate
from baton.serve.http.pages import Pages
from baton.serve.http.routes import ChatRoute, CompletionRoute
from baton.serve.http.services import Services
from baton.serve.http.settings import HttpSettings
from baton.serve.http.wire.errors import error_body, error_headers
from baton.serve.live.hooks import Hooks
from baton.serve.live.port import Gateway


def build_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    *,
    settings: HttpSettings,
    hooks: Hooks,
    render_metrics: Callable[[], bytes],
) -> ASGIApp:
    """Build the ASGI application. Run it with one worker process: the gateway lives in this one."""
    services = Services(
        gateway=gateway,
        tokenizer=tokenizer,
        template=chat_template,
        settings=settings,
        hooks=hooks,
        render_metrics=render_metrics,
        seeds=random.SystemRandom() if settings.seed is None else random.Random(settings.seed),
        started_unix_s=unix_s(),
    )
    generating = (CompletionRoute(tokenizer, gateway.card), ChatRoute(tokenizer, chat_template))
    routes = [Route(route.path, Generate(services, route), methods=["POST"]) for route in generating]
    embed = Route(EMBEDDINGS_PATH, Embed(services), methods=["POST"])
    app = Starlette(
        routes=[*routes, embed, *Pages(services).routes()],
        exception_handlers={
            RequestError: _refuse,
            HTTPException: _refuse_route,
            ClientGone: _say_nothing,
            Exception: _fail,
        },
    )
    app.router.redirect_slashes = False  # an unknown path is a 404 with a body, not a redirect
    return Entrance(app, settings.api_keys)


def _respond(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    everything = {**error_headers(error), **(headers or {})}
    return Response(error_body(error), status_code=error.status, headers=everything, media_type="application/json")


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), f"{error!r} is no request error"
    return _respond(error)


def _refuse_route(request: Request, error: Exception) -> Response:
    """Answer for an unknown path (404) or method (405, with what is allowed)."""
    assert isinstance(error, HTTPException), f"{error!r} is no HTTP error"
    status = error.status_code
    words = {404: "there is nothing at this path; see /openapi.json", 405: "this path does not take this method"}
    message = f"{request.method} {request.url.path[:200]}: {words.get(status, HTTPStatus(status).phrase)}"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return _respond(RequestError(message, status=status, code=code), dict(error.headers or {}))


def _say_nothing(request: Request, error: Exception) -> Response:
    """The client is gone; whatever is sent goes nowhere."""
    return Response(status_code=499)


def _fail(request: Request, error: Exception) -> Response:
    """Answer for a bug of ours. Starlette raises it again afterwards, so that the server logs it.

    The server then hangs up, so the answer says so: a client that kept the connection would meet a reset.
    """
    message = "the server failed on this request; its log has the traceback"
    return _respond(RequestError(message, status=500, code="internal_error"), {"connection": "close"})
