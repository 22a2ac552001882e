"""Run the server: its own workers, the hosts that join, and HTTP, until every process it started has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from baton.compute.models.tokenizer import load_tokenizer
from baton.compute.sandbox.template import load_chat_template
from baton.core.errors import ConfigError
from baton.core.leaving import DismissHost, RestartWorker
from baton.core.messages import RetireWorker, StartWorker
from baton.decide.policy.classes import ClassTable
from baton.move.ipc.acceptor import listen
from baton.move.ipc.tls import ServerTls
from baton.serve.host.arena_bytes import bytes_of, transferable
from baton.serve.host.sizing import raise_files_max
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.host.tasks import prefault, spawn
from baton.serve.host.worker_link import EngineHosts
from baton.serve.http.app import build_app
from baton.serve.http.connections import Connections
from baton.serve.http.grammar_checks import GrammarChecker
from baton.serve.http.identity import Keyring, KeySources
from baton.serve.http.prompts import PublicPrefixes
from baton.serve.http.protocol import HttpServerConfig
from baton.serve.http.server import HttpServer
from baton.serve.http.services import HttpSettings, Services
from baton.serve.live.assembly import Parts
from baton.serve.live.hosts import Hosts
from baton.serve.live.own_workers import OwnWorkers
from baton.serve.live.tiers import kv_blocks

_CHECK_S = 30.0
_HTTP_CLOSE_S = 3.0
"""Seconds that open connections have to close after the last request has ended."""

_FILES_ENOUGH = 1024
"""The server warns if it may open fewer files than this."""

Tell = Callable[[str], None]


async def serve(parts: Parts, *, tell: Tell, engines: EngineHosts | None = None) -> int:
    """Serve until a signal arrives. Return the exit code. Raises ConfigError if the port cannot be used.

    `engines`: servers of another engine that replace Baton's workers. None: Baton starts its own workers.
    """
    connections_max = _connections_max(tell)
    http = parts.config.http
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(_listen(http.host, http.port))]
        if http.admin_port:
            listeners.append(opened.enter_context(_listen(http.admin_host, http.admin_port)))
        return await Service(parts, listeners, engines, connections_max=connections_max, tell=tell).run()


class Service:
    """Runs the parts of a server until a signal arrives or no worker can be kept alive."""

    def __init__(
        self,
        parts: Parts,
        listeners: list[socket.socket],
        engines: EngineHosts | None,
        *,
        connections_max: int,
        tell: Tell,
    ) -> None:
        """`listeners`: the socket for clients, then the socket of the admin port, if one is configured.

        `connections_max`: maximum HTTP connections that the system's limit of open files allows.
        """
        self._parts = parts
        self._connections_max = connections_max
        self._listeners = listeners
        http = parts.config.http
        self._tls = ServerTls(Path(http.tls_cert), Path(http.tls_key)) if http.tls_cert else None
        self._url = _url(http.host, listeners[0].getsockname()[1], scheme="http" if self._tls is None else "https")
        self._tell = tell
        self._stop = asyncio.Event()
        self._signals = 0
        self._failure = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._hosts = Hosts(parts, url=self._url, tls=self._tls, tell=tell, changed=self._on_hosts)
        self._keyring = Keyring(
            KeySources(
                api_keys=http.api_keys,
                admin_key=http.admin_key,
                join_key=http.join_key,
                file=Path(http.key_file) if http.key_file else None,
            )
        )
        self._services: Services | None = None
        self._own: Supervisor | None = None
        self._is_own_ready = parts.own is None
        self._engines = engines

    async def run(self) -> int:
        """Serve until the end. Return the exit code: 0 after a signal, 1 if the workers cannot be kept alive."""
        parts = self._parts
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if parts.config.http.key_file or self._tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._tell(f"listening on {self._url} (503 until the model is loaded)")
        try:
            await self._serve()
        finally:
            await self._close()
        for pool in parts.driver.pools.values():
            pool.check()
        return 1 if self._failure else 0

    async def _serve(self) -> None:
        """Start everything, and serve until the stop event. Raises ModelError or ConfigError if the start fails."""
        await self._start_tiers()
        if self._engines is not None:
            await self._engines.start(self._on_hosts)
        self._start_workers()
        # Read the tokenizer while the workers start: it takes as long as their imports.
        http = HttpServer(await asyncio.to_thread(self._http_config))
        self._on_ready()
        serving = asyncio.create_task(http.serve(sockets=self._listeners))
        serving.add_done_callback(self._on_http_end)
        await self._stop.wait()
        await self._drain()
        http.should_exit = True
        await asyncio.wait({serving})

    async def _close(self) -> None:
        """Stop everything that was started. No process is left when this returns."""
        parts = self._parts
        if self._services is not None:
            self._services.close()
        await self._hosts.stop()
        if self._engines is not None:
            await self._engines.stop()
        if self._own is not None:
            await self._own.stop()
        for task in self._tasks:
            task.cancel()
        if parts.driver.log is not None:
            parts.driver.log.close()
        if parts.own_tiers is not None:
            await parts.own_tiers.close()
        if parts.own is not None:
            parts.own.arena.close()

    async def _start_tiers(self) -> None:
        own, tiers = self._parts.own, self._parts.own_tiers
        if own is not None and tiers is not None:
            layout = self._parts.computing.layout
            await tiers.start(bytes_of(transferable(own.arena, layout), layout.block_bytes), layout.block_bytes)

    def _start_workers(self) -> None:
        """Start the workers of the server's own host, if it has any."""
        parts = self._parts
        if self._engines is not None:
            return
        if parts.own is None:
            self._tell(f"waiting for {parts.config.hosts.expected} hosts: baton host --join {self._url}")
            return
        own, notices = parts.own, Notices(tell=self._tell, ready=self._on_own_ready, failed=self._on_failed)
        self._own = Supervisor(OwnWorkers(parts.driver), own.setups, own.arena.fd, parts.config.survival, notices)
        self._own.start()

    def _resize(self, command: StartWorker | RetireWorker | RestartWorker | DismissHost) -> None:
        """Carry out a decision about the fleet, on the server's own host or on a joined host."""
        driver, own = self._parts.driver, self._parts.own
        if isinstance(command, RetireWorker | RestartWorker):
            host = driver.links[command.worker].view.host if command.worker in driver.links else ""
        else:
            host = command.host
        if not isinstance(command, DismissHost) and self._own is not None and own is not None and host == own.id:
            self._own.resize(command)
        elif not self._hosts.resize(command):
            self._tell(f"no host can carry out this decision: {command}")
            if isinstance(command, StartWorker):
                driver.lose(command.worker, "no host can start it")
            elif isinstance(command, RestartWorker) and command.worker in driver.links:
                driver.join(driver.links[command.worker])  # it stays; the restart goes on with the next one

    def _http_config(self) -> HttpServerConfig:
        parts, http, tls = self._parts, self._parts.config.http, self._tls
        tokenizer, template = load_tokenizer(parts.card), load_chat_template(parts.card, parts.config.sandbox)
        self._services = services = Services(
            gateway=parts.gateway,
            hosts=self._hosts,
            tokenizer=tokenizer,
            template=template,
            grammars=GrammarChecker(parts.card, parts.config.sandbox),
            settings=HttpSettings(
                block_tokens=parts.driver.layout.block_tokens,
                bound_host=http.host,
                admin_port=http.admin_port,
                allowed_hosts=(*http.allowed_hosts, *([http.admin_host] if http.admin_port else [])),
                cors_origins=http.cors_origins,
                body_bytes_max=http.body_bytes_max,
                choices_max=http.choices_max,
                limits=parts.config.limits,
                classes=ClassTable.of(parts.config),
                engine="vLLM" if parts.config.engines.servers else "",
                seed=parts.config.seed,
                survival=parts.config.survival,
            ),
            keyring=self._keyring,
            public_prefixes=PublicPrefixes(http.public_prefixes, tokenizer, template) if http.public_prefixes else None,
            hooks=parts.hooks,
            recorder=parts.driver.recorder,
            history=parts.history,
            render_metrics=self._render_metrics,
        )
        most = min(parts.config.limits.connections_max, self._connections_max)
        limits = msgspec.structs.replace(parts.config.limits, connections_max=most)
        connections = Connections(limits, parts.driver.recorder, proxies=http.proxies)
        return HttpServerConfig(build_app(services), connections, close_s=_HTTP_CLOSE_S, tls=tls)

    def _render_metrics(self) -> bytes:
        driver, metrics = self._parts.driver, self._parts.metrics
        metrics.set_workers(link.view for link in driver.links.values() if link.state != "lost")
        metrics.set_blocks(kv_blocks(driver.pools.values()))
        return metrics.render()

    def _reload(self) -> None:
        """Read the key file and the certificate again. An invalid file changes nothing."""
        readers = [("key file", self._keyring.reload)] if self._parts.config.http.key_file else []
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
            self._parts.gateway.cancel_all()
        self._stop.set()

    def _on_own_ready(self) -> None:
        self._is_own_ready = True
        self._on_ready()

    def _on_hosts(self) -> None:
        """Reject requests while no host can serve them, and accept them again once a host can."""
        gateway, engines = self._parts.gateway, self._engines
        joined, can_serve = self._hosts.joined, self._hosts.ready > 0
        hint = f": baton host --join {self._url}"
        if engines is not None:
            joined, can_serve, hint = engines.joined, engines.can_serve, ""
        if gateway.state == "ready" and self._own is None and not joined:
            gateway.state = "deserted"
            waiting, wait_s = len(self._parts.driver.live), self._parts.config.survival.wait_s
            self._tell(f"all hosts are gone; {waiting} requests wait for one, up to {wait_s:g} s{hint}")
        elif gateway.state == "deserted" and can_serve:
            gateway.state = "ready"
            self._tell("a host has joined: serving again")
        self._on_ready()

    def _on_ready(self) -> None:
        """Accept requests once the tokenizer is loaded and every expected host and worker is ready."""
        services = self._services
        is_waiting = not self._is_own_ready or self._hosts.ready < self._parts.config.hosts.expected
        is_waiting = is_waiting or (self._engines is not None and not self._engines.can_serve)
        if self._parts.gateway.state != "loading" or is_waiting or services is None:
            return
        self._parts.gateway.state = "ready"
        self._run(self._check_at_idle())
        self._run(services.grammars.warm_up())
        if self._parts.own is not None:
            self._run(prefault(self._parts.own.arena, self._on_failed))
        self._run(self._tick())
        self._run(self._parts.history.run())
        self._run(self._resize_fleet())
        self._tell(self._greeting())

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        error = None if serving.cancelled() else serving.exception()
        if error is not None:
            self._failure = f"the HTTP server failed: {type(error).__name__}: {error}"
            self._tell(self._failure)
        self._stop.set()

    def _run(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(spawn(work, self._tell))

    def _on_failed(self, reason: str) -> None:
        self._failure = reason
        self._parts.gateway.state = f"failed: {reason}"
        self._tell(f"no worker can be kept alive: {reason}")
        self._parts.gateway.cancel_all()
        self._stop.set()

    async def _drain(self) -> None:
        """Wait up to `drain_s` seconds for the running requests, then cancel them. End dashboard streams at once."""
        self._parts.history.close()
        self._parts.gateway.state = "stopping"  # also if `drain_s` is 0: then `stop` does not begin
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._parts.gateway.stop(), self._parts.config.survival.drain_s)
        self._parts.gateway.cancel_all()

    async def _tick(self) -> None:
        """Run the policies for roles, scaling and moves every `tick_s` seconds."""
        while True:
            await asyncio.sleep(self._parts.config.tick_s)
            self._parts.driver.tick()

    async def _resize_fleet(self) -> None:
        """Carry out the driver's decisions about workers and hosts, in their order."""
        while True:
            self._resize(await self._parts.driver.resizes.get())

    async def _check_at_idle(self) -> None:
        """Check for lost KV blocks (INV-2, INV-4) whenever no request is running."""
        while True:
            await asyncio.sleep(_CHECK_S)
            driver = self._parts.driver
            pools = list(driver.pools.values())
            if driver.live or any(pool.holders for pool in pools):
                continue
            try:
                for pool in pools:
                    pool.check()
            except AssertionError as error:
                self._tell(
                    f"bug in Baton, please report it: the counts of KV blocks disagree: {error}; restart to free them"
                )

    def _greeting(self) -> str:
        driver, dtype = self._parts.driver, self._parts.computing.dtype
        roles = [link.view.role for link in driver.links.values()]
        topology = " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        name, messages = self._parts.card.name, [{"role": "user", "content": "Hello! Introduce yourself."}]
        question = json.dumps({"model": name, "messages": messages, "temperature": 0})
        kv_tokens = sum(pool.view().blocks_total for pool in driver.pools.values()) * driver.layout.block_tokens
        key = ' -H "Authorization: Bearer $API_KEY"' if not self._keyring.is_open else ""
        return (
            f"ready: {self._url}  model {name} ({dtype})  {topology}  KV cache {kv_tokens} tokens  dashboard at /\n"
            f"try: curl {self._url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{question}'"
        )


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
