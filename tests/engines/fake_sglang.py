"""A server with the native HTTP interface of SGLang 0.5.23.

Its streams repeat all tokens so far, as those of the real server do. It does not notice that a stream was closed: the
request goes on until it is aborted by its id. An aborted leg does not end the other one.

A pair computes a prompt only once both servers have it, and the decode server must get exactly the prompt that the
prefill server computed for its room.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

from baton.core.engine_config import Engine
from baton.core.types import Role
from tests.engines.fake_engine import BLOCK_TOKENS, Asked, FakeEngine, Reason, data, error, next_token

_MODES: dict[str, Role] = {"null": "mixed", "prefill": "prefill", "decode": "decode"}
_bootstrap_ports = count(8998)
SAMPLING = {
    "max_new_tokens",
    "min_new_tokens",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logit_bias",
    "sampling_seed",
}
"""Sampling parameters that the fake knows. The real server rejects unknown ones too."""


@dataclass(slots=True)
class Room:
    """The meeting of both legs of a request."""

    has_decode: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the decode server waits for the KV."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the KV was sent, or the prefill server has given up."""
    sent: list[int] | None = None
    """The prompt whose KV was sent. None: no KV was sent."""


@dataclass(slots=True)
class FakeSglang(FakeEngine):
    mode: str = "null"
    is_incremental: bool = False
    """It was started with --incremental-streaming-output."""
    has_metrics: bool = True
    end_tokens: Sequence[int] = ()
    """The model's own tokens that end a turn."""
    bootstrap_port: int = field(default_factory=lambda: next(_bootstrap_ports))
    rooms: dict[int, Room] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    """Ids of the requests that the server still runs."""

    @property
    def engine(self) -> Engine:
        return "sglang"

    @property
    def role(self) -> Role:
        return _MODES[self.mode]

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)

    def forget(self) -> None:
        self.unfinished.clear()
        for room in self.rooms.values():
            room.is_over.set()
        self.rooms.clear()

    @property
    def is_empty(self) -> bool:
        return not self.unfinished

    def event(self, asked: Asked, output: list[int], reason: Reason | None) -> bytes:
        ends = {"stop": {"type": "stop", "matched": output[-1]}, "length": {"type": "length", "length": len(output)}}
        if reason is not None:
            self._end(asked.id)
        return data(self._answer(asked, output, ends[reason] if reason is not None else None))

    def _answer(self, asked: Asked, output: list[int], finish_reason: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "text": "?" * len(output),
            "output_ids": output[-1:] if self.is_incremental else output,
            "meta_info": {
                "id": asked.id,
                "finish_reason": finish_reason,
                "prompt_tokens": len(asked.tokens),
                "completion_tokens": len(output),
                "cached_tokens": 0,
            },
        }

    def _aborted(self, asked: Asked, status: int, message: str) -> dict[str, Any]:
        self._end(asked.id)
        reason = {"type": "abort", "message": message, "status_code": status, "err_type": None}
        return self._answer(asked, [], reason)

    # ---- routes

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "page_size": BLOCK_TOKENS,
                "dp_size": 1,
                "max_total_num_tokens": self.blocks * BLOCK_TOKENS,
                "disaggregation_mode": self.mode,
                "disaggregation_bootstrap_port": self.bootstrap_port,
                "internal_states": [{"effective_max_running_requests_per_dp": 64}],
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        base = {"id": "m", "object": "model", "parent": None, "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [base, {"id": "adapter", "parent": "m"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.polled.set()
        if not self.has_metrics:
            return error(404, "Not Found")
        label = 'engine_type="unified",model_name="m",tp_rank="0"'
        return web.Response(
            text=f'sglang:startup_time_seconds{{{label},phase="load_weight"}} {self.started_s}\n'
            f'sglang:startup_time_seconds{{{label},phase="scheduler_e2e"}} 1.5\n'
            f"sglang:num_running_reqs{{{label}}} {self.running}\n"
            f"sglang:num_queue_reqs{{{label}}} {self.waiting}\n"
            f"sglang:num_prefill_bootstrap_queue_reqs{{{label}}} 0.0\n"
            f"sglang:num_grammar_queue_reqs{{{label}}} 7.0\n"
            f"sglang:token_usage{{{label}}} 0.0\n"
        )

    async def _abort(self, request: web.Request) -> web.Response:
        """End a request. One that the server does not run is ignored, as by the real server."""
        name = (await request.json())["rid"]
        if name in self.unfinished:
            self._end(name)
            self.aborted.append(name)
            self.note_left()
        return web.Response()

    def _end(self, name: str) -> None:
        self.unfinished.discard(name)
        self.changed.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        unknown = sampling.keys() - SAMPLING
        if unknown or sampling["logit_bias"] is None or not body.get("input_ids"):
            return web.json_response({"error": f"unknown field `{unknown}`"}, status=400)
        stop_tokens = () if sampling["ignore_eos"] else (*sampling["stop_token_ids"], *self.end_tokens)
        asked = Asked(
            id=body["rid"],
            tokens=body["input_ids"],
            tokens_max=sampling["max_new_tokens"],
            tokens_min=sampling["min_new_tokens"],
            stop_tokens=stop_tokens,
        )
        failure = self.note(request, body, asked)
        if failure is not None:
            return failure
        self.unfinished.add(asked.id)
        if len(asked.tokens) + asked.tokens_max > self.context_tokens:
            self._end(asked.id)
            text = f"at most {self.context_tokens} tokens"
            return web.Response(body=data({"error": {"message": text, "type": "invalid_request_error", "code": 400}}))
        if self.mode == "null":
            return await self.stream(request, asked)
        if body.get("bootstrap_room") is None:
            message = "Invalid request: Disaggregated request received without bootstrap room id."
            return web.Response(body=data(self._aborted(asked, 400, message)))
        if self.mode == "prefill":
            return await self._prefill(asked, body["bootstrap_room"])
        return await self._decode(request, asked, body)

    async def _prefill(self, asked: Asked, number: int) -> web.Response:
        """Compute a prompt once the decode server waits for it, and send the KV."""
        room = self.rooms.setdefault(number, Room())
        self.began.set()
        await room.has_decode.wait()
        if not self.free_tokens:
            await self.gate.wait()
        if asked.id not in self.unfinished:
            return error(500, "aborted")
        room.sent = asked.tokens
        room.is_over.set()
        self._end(asked.id)
        return web.json_response(self._answer(asked, [next_token(asked.tokens)], {"type": "length", "length": 0}))

    async def _decode(self, request: web.Request, asked: Asked, body: dict[str, Any]) -> web.StreamResponse:
        """Wait for the KV of the prompt, and answer."""
        prefill = next((each for each in self.peers.values() if each.bootstrap_port == body["bootstrap_port"]), None)
        if prefill is None or prefill.mode != "prefill" or not prefill.is_up or body["bootstrap_host"] != "127.0.0.1":
            message = "Could not fetch prefill parallel info from bootstrap_addr"
            return web.Response(body=data(self._aborted(asked, 500, message)))
        room = prefill.rooms.setdefault(body["bootstrap_room"], Room())
        room.has_decode.set()
        self.began.set()
        await room.is_over.wait()
        if room.sent != asked.tokens:
            return web.Response(body=data(self._aborted(asked, 500, "Decode transfer failed for request")))
        self.loaded_tokens += len(asked.tokens)
        return await self.stream(request, asked)


async def _serve(port: int, key: str) -> None:
    """Run one server until this process ends."""
    await FakeSglang(started_s=float(os.getpid()), api_key=key).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    asyncio.run(_serve(int(sys.argv[sys.argv.index("--port") + 1]), settings["api-key"]))
