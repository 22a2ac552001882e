"""The HTTP server of a router of cells: the routes, and the limits of the edge that servers have too."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, json
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.config import Config
from baton.core.errors import ConfigError, RequestError
from baton.decide.control.cell_router import Cell, CellRules
from baton.move.ipc.acceptor import listen
from baton.move.ipc.tls import ServerTls
from baton.serve.cells.exchange import Exchange
from baton.serve.cells.fleet import CellFleet, CheckTimes
from baton.serve.cells.log import CellLog
from baton.serve.http.app import error_responses
from baton.serve.http.browser import BrowserRules
from baton.serve.http.budgets import Budgets
from baton.serve.http.connections import Connections
from baton.serve.http.edge import BodyLimit, ClientDisconnected, Edge, read_body, read_object, wait_for_disconnect
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.server import HttpServer
from baton.serve.http.timed_connection import HttpServerConfig
from baton.serve.http.wire.parsing import convert
from baton.serve.live.metrics_registry import CONTENT_TYPE, Metrics
from baton.serve.live.recorder import Recorder
from baton.serve.model_fleet import Tell

_POSTED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
_READ = ("/v1/models", "/v1/models/{model:path}", "/tokenizer_info", "/openapi.json")
"""Routes that any cell can serve. Others keep their state in one cell, such as files and batches."""


async def serve_cells(config: Config, cells: Sequence[Cell], rules: CellRules, *, tell: Tell) -> int:
    """Serve until a signal arrives, and then until the running requests end. Return the exit code.

    `config`: its sections `http`, `limits`, `survival` and `engines` (checks), and its log, count. Raises ConfigError
    if the port or the log cannot be used.
    """
    http, metrics = config.http, Metrics()
    tls = ServerTls(Path(http.tls_cert), Path(http.tls_key)) if http.tls_cert else None
    log = CellLog(Path(config.log), cells, rules, config.log_bytes_max, tell) if config.log else None
    times = CheckTimes(check_s=config.engines.check_s, silent_s=config.engines.silent_s)
    fleet = CellFleet(cells, rules, times, tell, log)
    connections = Connections(config.limits, Recorder(metrics), proxies=http.proxies)
    app = build_app(config, fleet, Recorder(metrics))
    try:
        listener = listen(http.host, http.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {http.host}:{http.port}: {error}; choose another --port") from error
    with listener, contextlib.closing(log) if log is not None else contextlib.nullcontext():
        server = HttpServer(HttpServerConfig(app, connections, close_s=config.survival.drain_s, tls=tls))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, partial(setattr, server, "should_exit", True))
        host = f"[{http.host}]" if ":" in http.host else http.host
        tell(f"listening on http{'s' if tls else ''}://{host}:{listener.getsockname()[1]}")
        checking = asyncio.create_task(fleet.run())
        try:
            await server.serve(sockets=[listener])
        finally:
            checking.cancel()
            await asyncio.wait({checking})
    return 0


def build_app(config: Config, fleet: CellFleet, recorder: Recorder) -> ASGIApp:
    """Return the ASGI application. It must run in the event loop of the fleet."""
    http, relay, pages = config.http, Relay(fleet, BodyLimit(config.http.body_bytes_max)), _Pages(fleet)
    app = Starlette(
        routes=[
            *(Route(path, relay, methods=["POST"]) for path in _POSTED),
            *(Route(path, relay, methods=["GET"]) for path in _READ),
            *pages.routes(),
        ],
        exception_handlers=error_responses(recorder),
    )
    app.router.redirect_slashes = False
    keyring = Keyring(KeySources(admin_key=http.admin_key))
    rules = BrowserRules(bound_host=http.host, hosts=http.allowed_hosts, origins=http.cors_origins)
    return Edge(app, keyring, rules, Budgets(config.limits), recorder)


class Relay:
    """The ASGI endpoint of every route that a cell serves."""

    def __init__(self, fleet: CellFleet, limit: BodyLimit) -> None:
        self._fleet = fleet
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Raises RequestError if it fails before a byte of the response was sent."""
        body = b""
        if scope["method"] == "POST":
            try:
                body = (await read_body(scope, receive, self._limit)).raw
            except ClientDisconnected:
                return
        working = asyncio.create_task(Exchange(self._fleet, scope, body, send).run())
        watching = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.wait({working, watching})


class CellStatus(Struct, frozen=True):
    """A cell in `GET /cluster`."""

    url: str
    state: str
    draining: bool
    weight: float
    running: int


class Drain(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /cluster/cells`."""

    cell: str
    drain: bool


class _Pages:
    """The routes that the router serves itself."""

    def __init__(self, fleet: CellFleet) -> None:
        self._fleet = fleet

    def routes(self) -> list[Route]:
        return [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/cluster", self._cluster),
            Route("/cluster/cells", self._drain, methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self._fleet.takes_requests:
            return _json({"status": "ready"})
        raise RequestError("no cell takes requests; GET /cluster has their states", status=503, code="no_cell")

    async def _metrics(self, request: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(self._fleet)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    async def _cluster(self, request: Request) -> Response:
        cells = [
            CellStatus(cell.name, cell.state, cell.is_draining, cell.weight, cell.running) for cell in self._fleet.cells
        ]
        return _json({"cells": cells})

    async def _drain(self, request: Request) -> Response:
        asked = convert(await read_object(request), Drain)
        self._fleet.drain(asked.cell, is_draining=asked.drain)
        return await self._cluster(request)


def _json(body: dict[str, Any]) -> Response:
    return Response(json.encode(body), media_type="application/json")
