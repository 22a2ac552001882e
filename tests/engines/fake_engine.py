"""The part of a fake server that all engines share: its language model, its faults and its address.

The language model is a hash of all tokens so far, so that a token that is lost, repeated or swapped changes all later
ones. A subclass has the routes and the forms of one engine.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Literal

from aiohttp import web

from baton.core.engine_config import Engine, EngineConfig
from baton.core.types import Role
from tests.loop_server import LoopServer

BLOCK_TOKENS = 16
TOKENS = 95
"""Output tokens are printable ASCII of the hash model: 35 and the 94 after it."""
Reason = Literal["stop", "length"]
_starts = count(1)


def next_token(tokens: Sequence[int], banned_tokens: Collection[int] = ()) -> int:
    digest = blake2b(array("I", tokens).tobytes(), digest_size=4).digest()
    token = 35 + int.from_bytes(digest, "little") % TOKENS
    while token in banned_tokens:
        token += 1
    return token


def answer_to(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the answer of the model to a prompt."""
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that a server has got."""

    id: str
    tokens: list[int]
    tokens_max: int
    tokens_min: int = 0
    stop_tokens: Sequence[int] = ()
    banned_tokens: Collection[int] = ()
    """Tokens without probability."""


@dataclass(slots=True)
class FakeEngine:
    """One server. Its fields can be changed while it runs, for faults."""

    name: str = "fake"
    host: str = "127.0.0.1"
    blocks: int = 256
    context_tokens: int = 2048
    api_key: str = ""
    started_s: float = field(default_factory=lambda: float(next(_starts)))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Tokens after `free_tokens` of an answer wait for it."""
    free_tokens: int = 1 << 30
    fail_posts: int = 0
    """Number of the next requests that get the status `failure`."""
    failure: int = 500
    break_after: int | None = None
    """Tokens after which each stream breaks off."""
    more_tokens: int = 0
    """Tokens that it generates beyond what was asked."""
    ends_after: int = 1 << 30
    """Tokens after which it ends an answer as too long, whatever was asked."""
    is_silent: bool = False
    """It accepts connections and answers none of them."""
    tokenizer: list[int] | None = None
    """Its tokens of every text. None: it has no tokenizer."""
    running: int = 0
    waiting: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """Ids of requests that were aborted by name, as the server knows them."""
    closed: int = 0
    """Streams that their client has closed before their end."""
    open_streams: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a client has closed a stream."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request was both closed and aborted by its name."""
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each request for metrics."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request has arrived."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an answer has begun."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a request has ended."""
    health: int = 200
    """Status of its route of health."""
    hides_metrics: bool = False
    """It answers no request for its metrics."""
    speaks_otherwise: bool = False
    """Its events have another form, as those of another version."""
    takes_aborts: bool = True
    """It has a route that aborts a request by its id."""
    peers: dict[str, Any] = field(default_factory=dict)
    """All servers of the test by their names."""
    loaded_tokens: int = 0
    """Tokens whose KV came from another server."""
    url: str = ""
    _server: LoopServer | None = None
    _port: socket.socket | None = None
    """Keeps the address while the server does not run: other processes of the machine take free ports all the time."""

    # ---- an engine's own

    @property
    def engine(self) -> Engine:
        raise NotImplementedError

    def add_routes(self, app: web.Application) -> None:
        raise NotImplementedError

    def event(self, asked: Asked, output: list[int], reason: Reason | None) -> bytes:
        """Return the event of a stream after its newest token."""
        raise NotImplementedError

    def forget(self) -> None:
        """Lose the state of the process. Without KV for other servers, there is none."""

    @property
    def is_empty(self) -> bool:
        """Whether no hand-off is unfinished, and no KV is kept for another server. `open_streams` is counted apart."""
        return True

    @property
    def metrics_path(self) -> str:
        """The route by which Baton reads the load, and notices that the server is alive."""
        return "/metrics"

    # ---- the process

    def config(self, role: Role = "mixed") -> EngineConfig:
        return EngineConfig(url=self.url, role=role, engine=self.engine)

    async def start(self, port: int = 0) -> None:
        if self._port is None:
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind((self.host, port))
        app = web.Application(middlewares=[self._guard])
        self.add_routes(app)
        self._server = LoopServer(app, self._port.getsockname()[1], self.host)
        await self._server.start()
        self.url = f"http://{self.host}:{self._server.port}"

    @property
    def is_up(self) -> bool:
        return self._server is not None

    async def stop(self) -> None:
        """End as if killed: connections break, and the address refuses further ones."""
        server, self._server = self._server, None
        if server is not None:
            self.forget()
            await server.stop()

    async def restart(self) -> None:
        """Start again at the same address, as another process with an empty cache."""
        self.started_s = float(next(_starts))
        await self.start()

    async def close(self) -> None:
        """End for good, and give up the address."""
        await self.stop()
        if self._port is not None:
            self._port.close()

    # ---- answers

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.hides_metrics and request.path == self.metrics_path:
            self.polled.set()
            await asyncio.Event().wait()
        if self.is_silent:
            await asyncio.Event().wait()
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return error(401, "Unauthorized")
        return await handler(request)

    async def answer_health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def tokenize(self, _: web.Request) -> web.Response:
        return error(404, "Not Found") if self.tokenizer is None else web.json_response({"tokens": self.tokenizer})

    def note(self, request: web.Request, body: dict[str, Any], asked: Asked) -> web.Response | None:
        """Note a request. Return the error that it gets now, if any."""
        self.bodies.append(body)
        self.asked.append(asked)
        self.arrived.set()
        self.traceparents.append(request.headers.get("traceparent", ""))
        if self.fail_posts:
            self.fail_posts -= 1
            return error(self.failure, "the engine failed")
        return None

    async def emptied(self) -> None:
        """Wait until the server is empty."""
        while not self.is_empty or self.open_streams:
            self.changed.clear()
            await self.changed.wait()

    def note_left(self) -> None:
        if self.aborted and self.closed:
            self.left.set()

    async def stream(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        """Send the answer token by token."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        known, most = list(asked.tokens), min(self.ends_after, asked.tokens_max + self.more_tokens)
        self.open_streams += 1
        try:
            for number in range(1, most + 1):
                if number > self.free_tokens:
                    await self.gate.wait()
                if self.break_after is not None and number > self.break_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                known.append(next_token(known, asked.banned_tokens))
                is_stop = known[-1] in asked.stop_tokens and number > asked.tokens_min
                reason: Reason | None = "stop" if is_stop else "length" if number == most else None
                if self.speaks_otherwise:
                    await response.write(data({"choices": 5, "output_ids": {}, "tokens": {}}))
                await response.write(self.event(asked, known[len(asked.tokens) :], reason))
                self.began.set()
                await asyncio.sleep(0)  # streams take turns
                if reason:
                    break
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.closed += 1
            self.hung_up.set()
            self.note_left()
            raise
        finally:
            self.open_streams -= 1
            self.changed.set()
        return response


def data(content: dict[str, Any]) -> bytes:
    """Return one event of a stream."""
    body = web.json_response(content).body
    assert isinstance(body, bytes)
    return b"data: " + body + b"\n\n"


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": status}}, status=status)


@asynccontextmanager
async def servers(*fakes: FakeEngine) -> AsyncIterator[None]:
    """Run servers that can load KV from each other."""
    for fake in fakes:
        fake.peers = {other.name: other for other in fakes}
        await fake.start()
    try:
        yield
    finally:
        for fake in fakes:
            await fake.close()
