"""Run the server: its own workers, hosts that join, and HTTP, from the start to the last process's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator

import uvicorn

from baton.compute.models.chat_template import load_chat_template
from baton.compute.models.tokenizer import load_tokenizer
from baton.core.errors import ConfigError
from baton.core.messages import RetireWorker, StartWorker
from baton.serve.host.arena_bytes import bytes_of, movable
from baton.serve.host.sizing import raise_files_max
from baton.serve.host.supervisor import Notices, Supervisor
from baton.serve.host.tasks import prefault, spawn
from baton.serve.http.app import build_app
from baton.serve.http.services import HttpSettings
from baton.serve.live.assembly import Parts
from baton.serve.live.hosts import Hosts
from baton.serve.live.own_workers import OwnWorkers
from baton.serve.live.tiers import kv_blocks

_CHECK_S = 30.0
_HTTP_CLOSE_S = 3.0
"""How long open connections may linger after the last request has ended."""

_FILES_ENOUGH = 1024
"""Below this many open files per process it is worth a word."""

Tell = Callable[[str], None]


class Service:
    """Runs the parts until a signal comes or nothing can be served any more."""

    def __init__(self, parts: Parts, *, tell: Tell) -> None:
        self._parts = parts
        self._tell = tell
        self._stop = asyncio.Event()
        self._signals = 0
        self._failure = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._url = ""
        self._hosts = Hosts(parts, tell=tell, changed=self._on_hosts)
        parts.gateway.terms = self._hosts.terms
        parts.gateway.awaited = self._awaited
        self._own: Supervisor | None = None
        self._is_own_ready = parts.own is None

    async def run(self) -> int:
        """Serve. Returns the exit code: 0 after a signal, 1 when the workers cannot be kept alive."""
        parts = self._parts
        loop = asyncio.get_running_loop()
        self._prepare()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        with _listen(parts.config.http.host, parts.config.http.port) as listener:
            self._url = _url(parts.config.http.host, listener.getsockname()[1])
            self._tell(f"listening on {self._url} (503 until the model is loaded)")
            try:
                await self._serve(listener)
            finally:
                await self._close()
        for pool in parts.driver.pools.values():
            pool.check()
        return 1 if self._failure else 0

    async def _serve(self, listener: socket.socket) -> None:
        """Raises ModelError where the vocabulary cannot be read."""
        await self._start_tiers()
        self._start_workers()
        # The vocabulary is read beside that: it takes as long as a worker's imports.
        http = _HttpServer(await asyncio.to_thread(self._http_config))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        serving.add_done_callback(self._on_http_end)
        await self._stop.wait()
        await self._drain()
        http.should_exit = True
        await asyncio.wait({serving})

    async def _close(self) -> None:
        """End what was started. No process is left when this returns."""
        parts = self._parts
        await self._hosts.stop()
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
            await tiers.start(bytes_of(movable(own.arena, layout), layout.block_bytes), layout.block_bytes)

    def _start_workers(self) -> None:
        """Start those of this host, if it has any."""
        parts = self._parts
        parts.driver.outside.on_resize = self._resize
        if parts.own is None:
            self._tell(f"waiting for {parts.config.hosts.expected} hosts: baton host --join {self._url}")
            return
        notices = Notices(tell=self._tell, ready=self._on_own_ready, failed=self._on_failed)
        own = parts.own
        self._own = Supervisor(OwnWorkers(parts.driver), own.setups, own.arena.fd, parts.config.survival, notices)
        self._own.start()

    def _resize(self, command: StartWorker | RetireWorker) -> None:
        """Do what scaling wants: on the host of that worker, here if there are workers, else elsewhere."""
        links = self._parts.driver.links
        is_own = self._own is not None and self._parts.own is not None
        if isinstance(command, RetireWorker) and command.worker in links:
            is_own = is_own and links[command.worker].view.host == self._parts.own.id
        if is_own:
            self._own.resize(command)
        elif not self._hosts.resize(command):
            self._tell(f"nobody can do what scaling wants: {command}")
            if isinstance(command, StartWorker):  # told when what has asked for it is over
                lose = self._parts.driver.lose
                asyncio.get_running_loop().call_soon(lose, command.worker, "there is no host that could start it")

    def _prepare(self) -> None:
        files_max = raise_files_max()
        if files_max < _FILES_ENOUGH:
            self._tell(
                f"this process may open {files_max} files, so it serves fewer than {files_max} connections at once and"
                f" drops the rest; raise the hard limit: ulimit -Hn {_FILES_ENOUGH}"
            )
        if self._parts.driver.log is not None:
            self._parts.driver.log.on_full = self._tell

    def _http_config(self) -> uvicorn.Config:
        parts, http = self._parts, self._parts.config.http
        app = build_app(
            parts.gateway,
            load_tokenizer(parts.card),
            load_chat_template(parts.card),
            settings=HttpSettings(
                block_tokens=parts.driver.layout.block_tokens,
                api_keys=http.api_keys,
                body_bytes_max=http.body_bytes_max,
                choices_max=http.choices_max,
                seed=parts.config.seed,
            ),
            hooks=parts.hooks,
            render_metrics=self._render_metrics,
        )
        return uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=int(_HTTP_CLOSE_S)
        )

    def _render_metrics(self) -> bytes:
        driver, metrics = self._parts.driver, self._parts.metrics
        metrics.set_workers(link.view for link in driver.links.values() if link.state != "lost")
        metrics.set_blocks(kv_blocks(driver.pools.values()))
        return metrics.render()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._tell("shutting down: running requests may finish (again to end them now)")
        else:
            self._parts.gateway.cancel_all()
        self._stop.set()

    def _awaited(self) -> str:
        """See `Gateway.awaited`."""
        loading = [link.view.id for link in self._parts.driver.links.values() if link.state == "starting"]
        found = [f"{', '.join(loading)} to load the model"] if loading else []
        expected = self._parts.config.hosts.expected
        missing = expected - self._hosts.joined
        if missing > 0:
            found.append(f"{missing} of {expected} hosts to join (baton host --join {self._url})")
        return " and ".join(found)

    def _on_own_ready(self) -> None:
        self._is_own_ready = True
        self._on_ready()

    def _on_hosts(self) -> None:
        """Hosts have come or gone: what nobody can compute is refused, until somebody can."""
        gateway = self._parts.gateway
        if gateway.state == "ready" and self._own is None and not self._hosts.joined:
            gateway.state = "deserted"
            waiting = len(self._parts.driver.live)
            wait_s = self._parts.config.survival.wait_s
            self._tell(
                f"all hosts are gone; {waiting} requests wait for one, for {wait_s:g} s: baton host --join {self._url}"
            )
        elif gateway.state == "deserted" and self._hosts.ready:
            gateway.state = "ready"
            self._tell("there is a host again")
        self._on_ready()

    def _on_ready(self) -> None:
        """Some worker is ready: open where those are that were asked for."""
        is_waiting = not self._is_own_ready or self._hosts.ready < self._parts.config.hosts.expected
        if self._parts.gateway.state != "loading" or is_waiting:
            return
        self._parts.gateway.state = "ready"
        self._run(self._check_at_idle())
        if self._parts.own is not None:
            self._run(prefault(self._parts.own.arena))
        if self._parts.driver.is_restless:
            self._run(self._tick())
        self._tell(self._greeting())

    def _on_http_end(self, serving: asyncio.Task[None]) -> None:
        """Nobody can ask any more, whether we have ended it or not."""
        error = None if serving.cancelled() else serving.exception()
        if error is not None:
            self._failure = f"HTTP has ended: {type(error).__name__}: {error}"
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
        """Let running requests finish for a while, then give them up."""
        quiet = asyncio.Event()
        self._parts.gateway.stop(quiet.set)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(quiet.wait(), self._parts.config.survival.drain_s)
        self._parts.gateway.cancel_all()

    async def _tick(self) -> None:
        """Let policies of roles, scaling and moves look at the cluster from time to time."""
        while True:
            await asyncio.sleep(self._parts.config.tick_s)
            self._parts.driver.tick()

    async def _check_at_idle(self) -> None:
        """Look for lost blocks (INV-2, INV-4) when nobody waits for an answer."""
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
                    f"a bug of ours, please report it: KV blocks do not add up: {error}; restart to get them back"
                )

    def _greeting(self) -> str:
        driver = self._parts.driver
        roles = [link.view.role for link in driver.links.values()]
        topology = " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        name = self._parts.card.name
        messages = [{"role": "user", "content": "Hello! Who are you?"}]
        question = json.dumps({"model": name, "messages": messages, "temperature": 0})
        dtype = self._parts.computing.dtype
        blocks = sum(pool.view().blocks_total for pool in driver.pools.values())
        kv_tokens = blocks * driver.layout.block_tokens
        key = ' -H "Authorization: Bearer $API_KEY"' if self._parts.config.http.api_keys else ""
        return (
            f"ready: {self._url}  model {name} ({dtype})  {topology}  KV cache {kv_tokens} tokens  page /ui\n"
            f"try: curl {self._url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{question}'"
        )


class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the service decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Take the port before anything is loaded, so that a taken one is told at once."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --port (0 takes a free one) or --host"
        ) from error
    return listener


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
