"""A small real HTTP server that speaks OpenAI's API well, or wrongly in one way at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.loop_server import loop_server

Body = dict[str, object]
Streamer = Callable[["Stream", Body], Awaitable[None]]


@dataclass
class Stream:
    """What a behaviour writes to."""

    response: web.StreamResponse
    request: web.Request
    chat: bool
    arrived: int
    """Streams that came before this one."""

    async def event(self, **fields: object) -> None:
        await self.raw(f"data: {json.dumps(fields)}\n\n".encode())

    async def token(self, text: str = "a", **choice: object) -> None:
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        await self.event(choices=[{"index": 0, "finish_reason": None, **content, **choice}])

    async def finish(self, reason: str = "length") -> None:
        content = {"delta": {}} if self.chat else {"text": ""}
        await self.event(choices=[{"index": 0, "finish_reason": reason, **content}])

    async def usage(self, output_tokens: int, input_tokens: int = 3, **details: object) -> None:
        usage = {"prompt_tokens": input_tokens, "completion_tokens": output_tokens, **details}
        await self.event(choices=[], usage=usage)

    async def done(self) -> None:
        await self.raw(b"data: [DONE]\n\n")

    async def raw(self, data: bytes) -> None:
        await self.response.write(data)


async def whole(stream: Stream, body: Body) -> None:
    """As it should be."""
    tokens = body["max_tokens"]
    assert isinstance(tokens, int)
    for _ in range(tokens):
        await stream.token()
    await stream.finish()
    prompt = body.get("prompt")
    await stream.usage(tokens, len(prompt) if isinstance(prompt, list) else 3)
    await stream.done()


@dataclass
class OddServer:
    """Streams by `behave`; answers the small questions like any server. Remembers what it was asked."""

    behave: Streamer = whole
    takes_ids: bool = True
    reads_ids_as_text: bool = False
    model: str | None = "odd"
    probe_status: int = 200
    refuse: int | None = None
    """Status of every streaming request, instead of a stream."""
    api_key: str | None = None
    bodies: list[Body] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    content_type: str = "text/event-stream"
    workers: list[dict[str, object]] | None = None
    """What `/cluster` tells, as Baton does. None: no such path."""

    @property
    def streamed(self) -> list[Body]:
        return [body for body in self.bodies if body.get("stream")]

    def app(self) -> web.Application:
        app = web.Application()
        if self.workers is not None:
            app.router.add_get("/cluster", self._cluster)
        for prefix in ("/v1", "/v3"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/completions", self._complete)
            app.router.add_post(f"{prefix}/chat/completions", self._complete)
        return app

    async def _cluster(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": self.workers, "hosts": [], "policy": {}})

    async def _models(self, request: web.Request) -> web.Response:
        if self.model is None:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.paths.append(request.path)
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return error(401, "wrong key")
        if not body.get("stream"):
            self.bodies.append(body)
            return self._answer(body)
        arrived = len(self.streamed)
        self.bodies.append(body)
        if self.refuse is not None:
            return error(self.refuse, "not today")
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        await self.behave(Stream(response, request, "chat" in request.path, arrived), body)
        return response

    def _answer(self, body: Body) -> web.Response:
        prompt = body.get("prompt")
        if self.probe_status != 200:
            return error(self.probe_status, "not ready")
        if isinstance(prompt, list) and not self.takes_ids:
            return error(400, "prompt must be a string")
        tokens = len(str(prompt)) if self.reads_ids_as_text else len(prompt) if isinstance(prompt, list) else 16
        return web.json_response({"choices": [{"text": "a"}], "usage": {"prompt_tokens": tokens}})


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "odd", "param": None, "code": None}}, status=status)


@asynccontextmanager
async def serving(server: OddServer) -> AsyncIterator[str]:
    """Serve on a free port of this loop; yields the URL."""
    async with loop_server(server.app()) as running:
        yield f"http://127.0.0.1:{running.port}"


@contextmanager
def serving_in_thread(server: OddServer) -> Iterator[str]:
    """Serve beside a test that runs a command, which has a loop of its own."""
    started: threading.Event = threading.Event()
    address: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with serving(server) as url:
            address.append(url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
