"""A server with the HTTP interface of vLLM 0.32.

KV for another server is checked: a decode server that gets parameters must get exactly the prompt that they were made
for.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from baton.core.engine_config import Engine
from tests.engines.fake_engine import BLOCK_TOKENS, Asked, FakeEngine, Reason, data, error, next_token


@dataclass(slots=True)
class FakeVllm(FakeEngine):
    has_generate: bool = True
    kept: dict[str, list[int]] = field(default_factory=dict)
    """Prompts whose KV waits for a decode server, by the request's id."""
    forgets: bool = False
    """It drops the KV of each prompt at once."""

    @property
    def engine(self) -> Engine:
        return "vllm"

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self.answer_health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)

    def forget(self) -> None:
        self.kept.clear()

    @property
    def is_empty(self) -> bool:
        return not self.kept

    def event(self, asked: Asked, output: list[int], reason: Reason | None) -> bytes:
        choice = {"index": 0, "token_ids": output[-1:], "finish_reason": reason}
        return data({"request_id": asked.id, "choices": [choice]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "m", "object": "model", "parent": None, "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [{"id": "adapter", "parent": "m"}, base]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.polled.set()
        label = 'engine="0",model_name="m"'
        return web.Response(
            text=f"process_start_time_seconds {self.started_s}\n"
            f"vllm:num_requests_running{{{label}}} {self.running}\n"
            f"vllm:num_requests_waiting{{{label}}} {self.waiting}\n"
            f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}} 7.0\n'
            f"vllm:kv_cache_usage_perc{{{label}}} 0.0\n"
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{self.blocks}"}} 1.0\n'
        )

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        self.aborted += [each.removeprefix("generate-tokens-") for each in ids]
        self.note_left()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        is_generate = request.path != "/v1/completions"
        if is_generate and not self.has_generate:
            return error(403, "Scale-out endpoints are disabled.")
        body = await request.json()
        tokens = body.get("token_ids" if is_generate else "prompt")
        if not tokens:
            return error(400, "token_ids: Field required")
        sampling = body["sampling_params"] if is_generate else body
        asked = Asked(
            id=body["request_id"],
            tokens=tokens,
            tokens_max=sampling["max_tokens"],
            tokens_min=sampling["min_tokens"],
            stop_tokens=sampling["stop_token_ids"],
        )
        failure = self.note(request, body, asked)
        if failure is not None:
            return failure
        if len(tokens) + asked.tokens_max > self.context_tokens:
            return error(400, f"at most {self.context_tokens} tokens")
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            kept = self.peers[params["remote_engine_id"]].kept.pop(params["remote_request_id"], None)
            if kept != tokens:
                return error(500, "the KV belongs to another prompt")
            self.loaded_tokens += len(tokens) - 1
        if not body["stream"]:
            return await self._whole(asked, params)
        return await self.stream(request, asked)

    async def _whole(self, asked: Asked, params: dict[str, Any]) -> web.Response:
        self.began.set()
        if not self.free_tokens:
            await self.gate.wait()
        told = None
        if params.get("do_remote_decode"):
            if not self.forgets:
                self.kept[asked.id] = asked.tokens
            told = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.name,
                "remote_request_id": asked.id,
                "remote_block_ids": [list(range(-(-len(asked.tokens) // BLOCK_TOKENS)))],
            }
        choice = {"index": 0, "token_ids": [next_token(asked.tokens)], "finish_reason": "length"}
        return web.json_response({"choices": [choice], "kv_transfer_params": told})


async def _serve(port: int) -> None:
    """Run one server until this process ends."""
    key = os.environ.get("VLLM_API_KEY", "")
    await FakeVllm(started_s=float(os.getpid()), api_key=key, free_tokens=5).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[sys.argv.index("--port") + 1])))
