"""A server with the HTTP interface of llama.cpp (October 2026) whose language model is that of `fake_vllm`.

It ends an answer at its own end-of-turn tokens only, and refuses what the real server refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.engines.fake_engine import next_token
from tests.loop_server import LoopServer


@dataclass(slots=True)
class FakeLlamaCpp:
    """One server. Its fields can be changed while it runs, for faults."""

    slots: int = 4
    context_tokens: int = 512
    api_key: str = ""
    end_tokens: Collection[int] = ()
    """Tokens that end a turn."""
    tokenizer: list[int] | None = None
    """Its tokens of every text. None: it has no such route."""
    break_after: int | None = None
    """Tokens after which each stream breaks off."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    free_tokens: int = 1 << 30
    """Tokens after which a stream waits for `gate`."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    running_max: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a client has closed a stream."""
    url: str = ""
    _server: LoopServer | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/completion", self._complete)
        self._server = LoopServer(app, port)
        await self._server.start()
        self.url = f"http://127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        """End as if killed: connections break, and the address refuses further ones."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "Invalid API Key")
        return await handler(request)

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.context_tokens, "params": {"temperature": 0.8}}
        known = {"total_slots": self.slots, "build_info": "b1-fake", "default_generation_settings": settings}
        return web.json_response(known)

    async def _slots(self, _: web.Request) -> web.Response:
        slots = [{"id": number, "is_processing": number < self.running} for number in range(self.slots)]
        return web.json_response(slots)

    async def _tokenize(self, _: web.Request) -> web.Response:
        return _error(404, "Not Found") if self.tokenizer is None else web.json_response({"tokens": self.tokenizer})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(body["prompt"]) > self.context_tokens:
            return _error(400, f"request ({len(body['prompt'])} tokens) exceeds the available context size")
        if body["repeat_last_n"] < 0 or not 0 <= body["seed"] < 2**32:
            return _error(400, "Value must be between 0 <= value <= 2147483647")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await self._stream(request, response, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up.set()
            raise
        finally:
            self.running -= 1
        return response

    def _next(self, tokens: list[int], body: dict[str, Any]) -> int:
        """Return the next token. With `ignore_eos`, tokens that end a turn have no probability."""
        token = next_token(tokens)
        while body["ignore_eos"] and token in self.end_tokens:
            token += 1
        return token

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        known = list(body["prompt"])
        most = min(body["n_predict"], self.context_tokens - len(known))
        for number in range(1, most + 1):
            if number > self.free_tokens:
                await self.gate.wait()
            if self.break_after is not None and number > self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return
            known.append(self._next(known, body))
            await response.write(_event({"content": "", "tokens": known[-1:], "stop": False}))
            await asyncio.sleep(0)  # streams take turns
            if known[-1] in self.end_tokens and not body["ignore_eos"]:
                await response.write(_event({"tokens": [], "stop": True, "stop_type": "eos"}))
                return
        await response.write(_event({"tokens": [], "stop": True, "stop_type": "limit"}))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + web.json_response(data).body + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "code": status}}, status=status)
