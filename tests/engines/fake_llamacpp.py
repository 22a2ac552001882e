"""A server with the HTTP interface of llama.cpp (October 2026).

It ends an answer at its own end-of-turn tokens only, and refuses what the real server refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from baton.core.engine_config import Engine
from tests.engines.fake_engine import Asked, FakeEngine, Reason, data, error


@dataclass(slots=True)
class FakeLlamaCpp(FakeEngine):
    context_tokens: int = 512
    """Context of each slot."""
    slots: int = 4
    takes_aborts: bool = False
    end_tokens: Collection[int] = ()
    """Tokens that end a turn. With `ignore_eos`, they have no probability."""
    has_marker: bool = True
    """Its properties have a text that each start changes."""
    streams_max: int = 0
    """The most streams that it had at once."""

    @property
    def engine(self) -> Engine:
        return "llamacpp"

    @property
    def metrics_path(self) -> str:
        return "/slots"

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._slots)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/completion", self._complete)

    def note_left(self) -> None:
        """Closing the connection is all that ends a request."""
        self.left.set()

    def event(self, asked: Asked, output: list[int], reason: Reason | None) -> bytes:
        token = data({"content": "", "tokens": output[-1:], "stop": False})
        last = {"tokens": [], "stop": True, "stop_type": "eos" if reason == "stop" else "limit"}
        return token + data(last) if reason else token

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.context_tokens, "params": {"temperature": 0.8}}
        known: dict[str, Any] = {"total_slots": self.slots, "build_info": "b1-fake"}
        marker = {"media_marker": f"<__media_{self.started_s}__>"} if self.has_marker else {}
        return web.json_response({**known, **marker, "default_generation_settings": settings})

    async def _slots(self, _: web.Request) -> web.Response:
        self.polled.set()
        slots = [{"id": number, "is_processing": number < self.open_streams} for number in range(self.slots)]
        return web.json_response(slots)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens, ignores_ends = body["prompt"], body["ignore_eos"]
        asked = Asked(
            id=str(len(self.asked)),
            tokens=tokens,
            tokens_max=min(body["n_predict"], self.context_tokens - len(tokens)),
            stop_tokens=() if ignores_ends else tuple(self.end_tokens),
            banned_tokens=self.end_tokens if ignores_ends else (),
        )
        failure = self.note(request, body, asked)
        if failure is not None:
            return failure
        if len(tokens) > self.context_tokens:
            return error(400, f"at most {self.context_tokens} tokens, but the request has {len(tokens)}")
        if body["repeat_last_n"] < 0 or not 0 <= body["seed"] < 2**32:
            return error(400, "Value must be between 0 <= value <= 2147483647")
        self.streams_max = max(self.streams_max, self.open_streams + 1)
        return await self.stream(request, asked)
