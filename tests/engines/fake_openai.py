"""Servers with OpenAI's completions: one takes and returns token ids, as vLLM and Baton do, the other one only text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from baton.compute.hash_engine import BYTE_TOKENS_FROM
from baton.core.engine_config import Engine, EngineConfig
from baton.core.types import Role
from baton.integrations.engines.port import PROBE
from tests.engines.fake_engine import BLOCK_TOKENS, Asked, FakeEngine, Reason, data, error, next_token

STANDARD = {
    *("model", "prompt", "max_tokens", "stream", "temperature", "top_p"),
    *("presence_penalty", "frequency_penalty", "seed", "logit_bias"),
}
"""The parameters of OpenAI's own API that Baton sends."""


@dataclass(slots=True)
class FakeOpenAi(FakeEngine):
    takes_aborts: bool = False
    takes_ids: bool = True
    is_strict: bool = False
    """It refuses parameters that OpenAI's API does not have."""
    ignores_others: bool = False
    """It ignores parameters that OpenAI's API does not have."""
    fail_metrics: int = 0
    """Number of the next requests for metrics that get a 500."""
    has_completions: bool = True
    end_tokens: tuple[int, ...] = ()
    """Tokens at which it ends an answer that may not be longer. Their text is not in the answer."""
    counted_more: int = 0
    """Tokens that it counts in a prompt beyond those of Baton."""
    probes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return "openai"

    def config(self, role: Role = "mixed") -> EngineConfig:
        return EngineConfig(url=self.url, role=role, engine="openai", kv_tokens=self.blocks * BLOCK_TOKENS)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self.tokenize)
        if self.has_completions:
            app.router.add_post("/v1/completions", self._complete)

    def note_left(self) -> None:
        """Closing the connection is all that ends a request."""
        if self.closed:
            self.left.set()

    def event(self, asked: Asked, output: list[int], reason: Reason | None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": text_of(output[-1:]), "finish_reason": reason}
        if self.takes_ids:
            choice["token_ids"] = output[-1:]
        elif reason == "stop":
            choice["text"] = ""
        return data({"choices": [choice]})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": self.context_tokens}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.polled.set()
        if self.fail_metrics:
            self.fail_metrics -= 1
            return error(500, "no metrics now")
        return web.Response(text=f"process_start_time_seconds {self.started_s}\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        if self.is_strict and not {*body} <= STANDARD:
            return error(400, f"Unrecognized request arguments: {sorted({*body} - STANDARD)}")
        if self.ignores_others:
            body = {name: value for name, value in body.items() if name in STANDARD}
        if not self.takes_ids and not isinstance(prompt, str):
            return error(422, "prompt must be a text")
        tokens = tokens_of(prompt) if isinstance(prompt, str) else prompt
        if tokens == tokens_of(PROBE):
            return self._probe(body, tokens)
        stops = body.get("stop_token_ids", ()) if self.takes_ids else self.end_tokens
        asked = Asked(
            id=str(len(self.asked)),
            tokens=tokens,
            tokens_max=body["max_tokens"],
            tokens_min=body.get("min_tokens", 0),
            stop_tokens=() if body.get("ignore_eos") else stops,
        )
        failure = self.note(request, body, asked)
        if failure is not None:
            return failure
        if len(tokens) + asked.tokens_max > self.context_tokens:
            return error(400, f"at most {self.context_tokens} tokens")
        return await self.stream(request, asked)

    def _probe(self, body: dict[str, Any], tokens: list[int]) -> web.Response:
        self.probes.append(body)
        token = next_token(tokens)
        choice: dict[str, Any] = {"text": text_of([token]), "finish_reason": "length"}
        if self.takes_ids and body.get("return_token_ids"):
            choice["token_ids"] = [token]
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(tokens) + self.counted_more}})


@dataclass(slots=True)
class FakeOpenAiText(FakeOpenAi):
    """Takes and returns text only."""

    takes_ids: bool = False


def tokens_of(text: str) -> list[int]:
    return [BYTE_TOKENS_FROM + byte for byte in text.encode()]


def text_of(tokens: list[int]) -> str:
    return bytes(token - BYTE_TOKENS_FROM for token in tokens).decode()
