"""Run the server: its models and HTTP, until every process that it started has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from baton.core.config import Config
from baton.core.errors import ConfigError
from baton.decide.policy.classes import ClassTable
from baton.move.ipc.acceptor import listen
from baton.move.ipc.tls import ServerTls
from baton.serve.host.sizing import raise_files_max
from baton.serve.host.worker_link import EngineHosts
from baton.serve.http.app import batch_endpoints, build_app
from baton.serve.http.batches.routes import Batches
from baton.serve.http.connections import Connections
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.model_routes import ModelRoutes
from baton.serve.http.server import HttpServer
from baton.serve.http.services import HttpSettings, Services
from baton.serve.http.timed_connection import HttpServerConfig
from baton.serve.live.assembly import Parts
from baton.serve.live.hooks import load_hooks
from baton.serve.live.metrics_registry import Metrics
from baton.serve.live.recorder import Recorder
from baton.serve.model_fleet import ModelFleet, ServerFacts, Tell
from baton.serve.models import Models

if TYPE_CHECKING:  # the extra `otel` may be missing
    from baton.serve.http.telemetry import Telemetry

_HTTP_CLOSE_S = 3.0
"""Seconds that open connections have to close after the last request has ended."""

_FILES_ENOUGH = 1024
"""The server warns if it may open fewer files than this."""


async def serve(config: Config, models: Sequence[Parts], *, tell: Tell, engines: EngineHosts | None = None) -> int:
    """Serve models until a signal arrives. Return the exit code. Raises ConfigError if the port cannot be used.

    `config`: of the server. `models`: at least one. `engines`: the workers of the only model, if they are servers of
    another engine.
    """
    connections_max = _connections_max(tell)
    http = config.http
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(_listen(http.host, http.port))]
        if http.admin_port:
            listeners.append(opened.enter_context(_listen(http.admin_host, http.admin_port)))
        return await Service(config, models, listeners, engines, connections_max=connections_max, tell=tell).run()


class Service:
    """Runs the models of a server and its HTTP, until a signal arrives or no model can be kept alive."""

    def __init__(
        self,
        config: Config,
        models: Sequence[Parts],
        listeners: list[socket.socket],
        engines: EngineHosts | None,
        *,
        connections_max: int,
        tell: Tell,
    ) -> None:
        """`listeners`: the socket for clients, then the socket of the admin port, if one is configured.

        `connections_max`: maximum HTTP connections that the system's limit of open files allows.
        """
        self._config = config
        self._connections_max = connections_max
        self._listeners = listeners
        http = config.http
        self._tls = ServerTls(Path(http.tls_cert), Path(http.tls_key)) if http.tls_cert else None
        self._url = _url(http.host, listeners[0].getsockname()[1], scheme="http" if self._tls is None else "https")
        self._tell = tell
        self._stop = asyncio.Event()
        self._signals = 0
        self._failure = ""
        self._announced: Sequence[ModelFleet] | None = None
        """The models that were announced as ready. None: the first ones are loading."""
        join_host = http.admin_host if http.admin_port else http.host
        join_url = _url(join_host, listeners[-1].getsockname()[1], scheme=self._url.partition(":")[0])
        facts = ServerFacts(url=self._url, join_url=join_url, tls=self._tls, tell=tell)
        self._models = Models(config, models, facts, changed=self._on_change, engines=engines)
        self._keyring = Keyring(
            KeySources(
                api_keys=http.api_keys,
                admin_key=http.admin_key,
                join_key=http.join_key,
                file=Path(http.key_file) if http.key_file else None,
            )
        )
        self._hooks = load_hooks(self._config.hooks)
        self._telemetry = _telemetry() if http.otlp else None
        self._batches: Batches | None = None
        """Files and batches. None: the models are starting."""
        self._metrics = Metrics()
        """Of the HTTP edge. Each model has metrics of its own."""

    async def run(self) -> int:
        """Serve until the end. Return the exit code: 0 after a signal, 1 if no model can be kept alive."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if self._config.http.key_file or self._tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._tell(f"listening on {self._url} (503 until the model is loaded)")
        try:
            await self._serve()
        finally:
            await self._models.close()
            if self._telemetry is not None:
                await asyncio.to_thread(self._telemetry.close)
        return 1 if self._failure else 0

    async def _serve(self) -> None:
        """Start everything, and serve until the stop event. Raises ModelError or ConfigError if the start fails."""
        await self._models.start()
        http = HttpServer(self._http_config())
        serving = asyncio.create_task(http.serve(sockets=self._listeners))
        serving.add_done_callback(self._on_http_end)
        await self._stop.wait()
        if self._batches is not None:
            await self._batches.close()
        await self._models.drain()
        http.should_exit = True
        await asyncio.wait({serving})

    def _http_config(self) -> HttpServerConfig:
        config, http, recorder = self._config, self._config.http, Recorder(self._metrics)
        services = Services(
            models=self._models.served,
            settings=HttpSettings(
                bound_host=http.host,
                admin_port=http.admin_port,
                allowed_hosts=(*http.allowed_hosts, *([http.admin_host] if http.admin_port else [])),
                cors_origins=http.cors_origins,
                body_bytes_max=http.body_bytes_max,
                choices_max=http.choices_max,
                strict_api=http.strict_api,
                limits=config.limits,
                classes=ClassTable.of(config),
                seed=config.seed,
                survival=config.survival,
            ),
            keyring=self._keyring,
            hooks=self._hooks,
            recorder=recorder,
            render_metrics=partial(self._models.render_metrics, self._metrics),
            telemetry=self._telemetry,
        )
        most = min(config.limits.connections_max, self._connections_max)
        limits = msgspec.structs.replace(config.limits, connections_max=most)
        connections = Connections(limits, recorder, proxies=http.proxies)
        endpoints = batch_endpoints(services)
        self._batches = Batches(config.batches, endpoints, config.limits, body_bytes_max=http.body_bytes_max)
        self._batches.runner.resume()
        app = build_app(services, [*ModelRoutes(self._models).routes(), *self._batches.routes()])
        return HttpServerConfig(app, connections, close_s=_HTTP_CLOSE_S, tls=self._tls)

    def _reload(self) -> None:
        """Read the key file and the certificate again. An invalid file changes nothing."""
        readers = [("key file", self._keyring.reload)] if self._config.http.key_file else []
        readers += [("certificate", self._tls.reload)] if self._tls is not None else []
        for name, reload in readers:
            try:
                reload()
            except ConfigError as error:
                self._tell(f"SIGHUP: the {name} cannot be read again and did not change: {error}")
            else:
                self._tell(f"SIGHUP: the {name} was read again")

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._tell("shutting down after the running requests; a second signal cancels them")
        else:
            self._models.cancel_all()
        self._stop.set()

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        error = None if serving.cancelled() else serving.exception()
        if error is not None:
            self._failure = f"the HTTP server failed: {type(error).__name__}: {error}"
            self._tell(self._failure)
        self._stop.set()

    def _on_change(self) -> None:
        """Handle a model that became ready, has failed or was unloaded. The server ends once every model has failed."""
        fleets = self._models.fleets
        if all(fleet.failure for fleet in fleets):
            self._failure = "; ".join(fleet.failure for fleet in fleets)
            self._stop.set()
        if self._announced is None and any(fleet.parts.gateway.state == "loading" for fleet in fleets):
            return  # the first models are announced together
        ready = [fleet for fleet in fleets if fleet.parts.gateway.state == "ready"]
        news = [fleet for fleet in ready if fleet not in (self._announced or ())]
        for fleet in news:
            self._tell(f"ready: {self._url}  {fleet.summary()}  dashboard at /")
        if self._announced is None and news:
            self._tell(self._example(news[0].name))
        self._announced = ready

    def _example(self, model: str) -> str:
        """Return a command that asks the server, for the terminal."""
        messages = [{"role": "user", "content": "Hello! Introduce yourself."}]
        question = json.dumps({"model": model, "messages": messages, "temperature": 0})
        key = ' -H "Authorization: Bearer $API_KEY"' if not self._keyring.is_open else ""
        return f"try: curl {self._url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{question}'"


def _telemetry() -> Telemetry:
    """Return the telemetry. Raises ConfigError if the extra is missing, or a variable `OTEL_*` cannot be followed."""
    try:
        from baton.serve.http.telemetry import open_telemetry
    except ImportError as error:
        raise ConfigError(f"http.otlp needs OpenTelemetry ({error.name}): pip install 'baton[otel]'") from error
    return open_telemetry()


def _connections_max(tell: Tell) -> int:
    """Raise the limit of open files as far as possible. Return how many HTTP connections it allows.

    Warn if the limit stays low. Half of a low limit is left for workers, hosts, stores and logs.
    """
    files_max = raise_files_max()
    connections_max = max(files_max // 2, files_max - _FILES_ENOUGH)
    if files_max < _FILES_ENOUGH:
        tell(
            f"this process may open {files_max} files, so it serves at most {connections_max} connections and refuses"
            f" the others; raise the hard limit: ulimit -Hn {_FILES_ENOUGH}"
        )
    return connections_max


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. This happens before anything is loaded, so that a port in use is reported at once."""
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --port (0 takes a free one) or --host"
        ) from error


def _url(host: str, port: int, *, scheme: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"
