"""HTTP clients of a scenario: they read slowly, repeat request ids, and disconnect at any moment."""

from __future__ import annotations

import asyncio
import json
from contextvars import ContextVar
from functools import partial
from random import Random

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from baton.core.types import RequestId
from baton.lab.sim.loop import EventLoop

CLIENT: ContextVar[HttpClient] = ContextVar("client")
"""The client whose request the current task serves."""
_PREFIXES = ("The sea is wide. ", "The sea is deep, ")


class PlannedClient(Struct, frozen=True, kw_only=True):
    """One HTTP request to `/v1/completions`, and the behaviour of its client."""

    at_s: float
    request_id: str
    """The header X-Request-Id. Several clients have the same one."""
    prompt: str
    output_tokens_max: int
    choices: int = 1
    stream: bool = True
    stop: str | None = None
    seed: int = 0
    temperature: float = 0.0
    body_pause_s: float = 0.0
    """Pause between the two halves of the body."""
    read_pause_s: float = 0.0
    """Pause before the client reads each message. The server can send no other one until then."""
    dies_after_s: float | None = None
    """Time from the arrival until the client disconnects. None: it reads the whole response."""

    def body(self) -> bytes:
        fields = {
            "prompt": self.prompt,
            "max_tokens": self.output_tokens_max,
            "n": self.choices,
            "stream": self.stream,
            "stop": self.stop,
            "seed": self.seed,
            "temperature": self.temperature,
        }
        return json.dumps(fields).encode()


def draw_clients(seed: int) -> tuple[PlannedClient, ...]:
    """Draw the HTTP clients of a scenario."""
    draw = Random(f"clients {seed}")
    return tuple(_draw_client(draw) for _ in range(draw.randint(2, 8)))


def _draw_client(draw: Random) -> PlannedClient:
    return PlannedClient(
        at_s=draw.uniform(0.0, 0.5),
        request_id=draw.choice(("same", "same", "other")),
        prompt=draw.choice(_PREFIXES) + "x" * draw.randint(0, 12),
        output_tokens_max=draw.choice((1, 4, 12)),
        choices=draw.choice((1, 1, 1, 2)),
        stream=draw.random() < 0.7,
        stop=draw.choice((None, None, "e")),
        seed=draw.randrange(100),
        temperature=draw.choice((0.0, 1.0)),
        body_pause_s=draw.choice((0.0, 0.0, 0.02)),
        read_pause_s=draw.choice((0.0, 0.0, 0.01, 0.5)),
        dies_after_s=draw.choice((None, None, draw.uniform(0.0, 0.05), draw.uniform(0.0, 1.0))),
    )


class HttpClient:
    """An actor of the simulation at the ASGI interface, in the place of the HTTP server and the client behind it."""

    def __init__(self, planned: PlannedClient, clock: EventLoop) -> None:
        self.planned = planned
        self.requests: list[RequestId] = []
        """Its requests to the cluster, one per choice."""
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_complete = False
        """The response has come to its end."""
        self.died_at_s: float | None = None
        self.serving: asyncio.Task[None] | None = None
        self._clock = clock
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._can_read = asyncio.Event()

    def arrive(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, send the headers and the body, and plan to disconnect."""
        self.serving = loop.create_task(self._serve(app))
        planned, body = self.planned, self.planned.body()
        half = len(body) // 2
        self._put(body[:half], more=True)
        self._clock.after(planned.body_pause_s, partial(self._put, body[half:], more=False))
        if planned.dies_after_s is not None:
            self._clock.after(planned.dies_after_s, self._die)

    async def _serve(self, app: ASGIApp) -> None:
        CLIENT.set(self)
        await app(self._scope(), self._incoming.get, self._send)

    def _scope(self) -> Scope:
        headers = {"content-type": "application/json", "x-request-id": self.planned.request_id, "host": "127.0.0.1"}
        return {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1000),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    def _put(self, part: bytes, *, more: bool) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def _die(self) -> None:
        if not self.is_complete:
            self.died_at_s = self._clock.now_s
            self._incoming.put_nowait({"type": "http.disconnect"})
            self._can_read.set()

    async def _send(self, message: Message) -> None:
        """Take a message once the client reads. Like the HTTP server, drop it if the client is gone."""
        if self.planned.read_pause_s and self.died_at_s is None:
            self._can_read.clear()
            self._clock.after(self.planned.read_pause_s, self._can_read.set)
            await self._can_read.wait()
        if self.died_at_s is not None:
            return
        assert not self.is_complete, f"{message} follows the end of a response"
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.body += message.get("body", b"")
        self.is_complete = not message.get("more_body", False)
