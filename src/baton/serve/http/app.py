"""The HTTP application: its routes, and the responses to errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from baton.core.errors import RequestError
from baton.serve.http.browser import BrowserRules
from baton.serve.http.budgets import Budgets
from baton.serve.http.edge import ClientDisconnected, Edge
from baton.serve.http.embed import EMBEDDINGS_PATH, Embed
from baton.serve.http.generate import Generate
from baton.serve.http.messages import Messages, MessagesText
from baton.serve.http.operations import Operations
from baton.serve.http.pages import Pages
from baton.serve.http.responses_text import Responses, ResponsesText
from baton.serve.http.services import Services
from baton.serve.http.site import Site
from baton.serve.http.stored_chats import StoredChats
from baton.serve.http.text_request import ChatText, CompletionText
from baton.serve.http.wire.errors import MESSAGES_PATH, error_body, error_headers
from baton.serve.live.recorder import Recorder

_OPERATIONS = {CompletionText.PATH: "text_completion", EMBEDDINGS_PATH: "embeddings"}
"""Values of OpenTelemetry's `gen_ai.operation.name` by path. All others are `chat`."""


def batch_endpoints(services: Services) -> dict[str, ASGIApp]:
    """Return the endpoints that batches may use, by their paths."""
    return {path: endpoint for path, endpoint in _endpoints(services).items() if path != MESSAGES_PATH}


def _endpoints(services: Services) -> dict[str, ASGIApp]:
    """Return the endpoints that compute something, by their paths."""
    kinds = (CompletionText, ChatText, ResponsesText, MessagesText)
    made: dict[str, ASGIApp] = {kind.PATH: Generate(services, kind) for kind in kinds}
    made[EMBEDDINGS_PATH] = Embed(services)
    telemetry = services.telemetry
    if telemetry is None:
        return made
    return {path: telemetry.traced(endpoint, _OPERATIONS.get(path, "chat")) for path, endpoint in made.items()}


def build_app(services: Services, further: Sequence[Route] = ()) -> ASGIApp:
    """Return the ASGI application with `further` routes. It must run in the event loop of the gateways."""
    endpoints = _endpoints(services)
    chats = StoredChats(services, endpoints.pop(ChatText.PATH))
    app = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
            *chats.routes(),
            *Responses(services).routes(),
            *Messages(services).routes(),
            *further,
            *Pages(services).routes(),
            *Operations(services).routes(),
            *Site().routes(),
        ],
        exception_handlers=error_responses(services.recorder),
    )
    app.router.redirect_slashes = False  # an unknown path is a 404 with a body, not a redirect
    settings = services.settings
    rules = BrowserRules(bound_host=settings.bound_host, hosts=settings.allowed_hosts, origins=settings.cors_origins)
    budgets = Budgets(settings.limits)
    edge = Edge(app, services.keyring, rules, budgets, services.recorder, admin_port=settings.admin_port)
    if not settings.cors_origins:
        return edge
    exposed = ("x-request-id", "retry-after", "warning")
    return CORSMiddleware(
        edge,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=exposed,
    )


def error_responses(recorder: Recorder) -> dict[Any, Any]:
    """Return Starlette's handlers of exceptions: they respond with OpenAI's error body."""
    return {
        RequestError: partial(_on_request_error, recorder),
        HTTPException: _on_wrong_route,
        ClientDisconnected: _on_disconnect,
        Exception: _on_bug,
    }


def _respond(request: Request, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    body, all_headers = error_body(error, request.url.path), {**error_headers(error), **(headers or {})}
    return Response(body, status_code=error.status, headers=all_headers, media_type="application/json")


async def _on_request_error(recorder: Recorder, request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), f"{error!r} is no request error"
    recorder.refused(error.status, error.code)
    return _respond(request, error)


async def _on_wrong_route(request: Request, error: Exception) -> Response:
    """Respond to an unknown path (404) or method (405, with the allowed methods)."""
    assert isinstance(error, HTTPException), f"{error!r} is no HTTP error"
    status = error.status_code
    words = {404: "there is nothing at this path; see /openapi.json", 405: "this path does not take this method"}
    message = f"{request.method} {request.url.path[:200]}: {words.get(status, HTTPStatus(status).phrase)}"
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return _respond(request, RequestError(message, status=status, code=code), dict(error.headers or {}))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never received, but Starlette needs a response


async def _on_bug(request: Request, error: Exception) -> Response:
    """Respond with status 500 to an unexpected exception. Starlette raises it again, so that the server logs it.

    The server then closes the connection. The header `Connection: close` keeps clients from reusing it.
    """
    message = "the server failed on this request; its log has the traceback"
    return _respond(request, RequestError(message, status=500, code="internal_error"), {"connection": "close"})
