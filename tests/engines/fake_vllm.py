"""A server with the HTTP interface of vLLM 0.32 whose language model is a hash of all tokens so far.

A token that is lost, repeated or swapped changes all later ones. KV for another server is checked: a decode server that
gets parameters must get exactly the prompt that they were made for.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any

from aiohttp import web

BLOCK_TOKENS = 16
TOKENS = 95
"""Output tokens are printable ASCII of the hash model: 35 and the 94 after it."""
LATE_TURNS = 4
"""Turns of the event loop after which a connection that was being accepted belongs to its server."""
_starts = count(1)


def next_token(tokens: Sequence[int]) -> int:
    digest = blake2b(array("I", tokens).tobytes(), digest_size=4).digest()
    return 35 + int.from_bytes(digest, "little") % TOKENS


def answer_to(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return the answer of the model to a prompt."""
    known = list(prompt)
    for _ in range(tokens):
        known.append(next_token(known))
    return known[len(prompt) :]


@dataclass(slots=True)
class FakeVllm:
    """One server. Its fields can be changed while it runs, for faults."""

    name: str = "fake"
    blocks: int = 256
    context_tokens: int = 2048
    has_generate: bool = True
    api_key: str = ""
    started_s: float = field(default_factory=lambda: float(next(_starts)))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Tokens after `free_tokens` of an answer wait for it."""
    free_tokens: int = 1 << 30
    fail_posts: int = 0
    """Number of the next requests that get a 500."""
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
    traceparents: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    closed: int = 0
    """Streams that their client has closed before their end."""
    open_streams: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a client has closed a stream."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request was both closed and aborted by its name."""
    polled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each request for metrics."""
    kept: dict[str, list[int]] = field(default_factory=dict)
    """Prompts whose KV waits for a decode server, by the request's id."""
    forgets: bool = False
    """It drops the KV of each prompt at once."""
    peers: dict[str, FakeVllm] = field(default_factory=dict)
    loaded_tokens: int = 0
    """Tokens whose KV came from another server."""
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an answer has begun."""
    url: str = ""
    _runner: web.AppRunner | None = None
    _port: socket.socket | None = None
    """Keeps the address while the server does not run: other processes of the machine take free ports all the time."""

    async def start(self, port: int = 0) -> None:
        if self._port is None:
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("127.0.0.1", port))
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        port = self._port.getsockname()[1]
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """End as if killed: connections break, and the address refuses further ones."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            await self._runner.cleanup()
            for _ in range(LATE_TURNS):
                await asyncio.sleep(0)
            await server.shutdown(0.0)
            self._runner = None

    async def restart(self) -> None:
        """Start again at the same address, as another process with an empty cache."""
        self.started_s = float(next(_starts))
        self.kept.clear()
        await self.start()

    async def close(self) -> None:
        """End for good, and give up the address."""
        await self.stop()
        if self._port is not None:
            self._port.close()

    # ---- routes

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "Unauthorized")
        return await handler(request)

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

    async def _tokenize(self, _: web.Request) -> web.Response:
        return _error(404, "Not Found") if self.tokenizer is None else web.json_response({"tokens": self.tokenizer})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted += (await request.json())["request_ids"]
        self._note_left()
        return web.Response()

    def _note_left(self) -> None:
        if self.aborted and self.closed:
            self.left.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        is_generate = request.path != "/v1/completions"
        if is_generate and not self.has_generate:
            return _error(403, "Scale-out endpoints are disabled.")
        body = await request.json()
        tokens = body.get("token_ids" if is_generate else "prompt")
        if not tokens:
            return _error(400, "token_ids: Field required")
        self.bodies.append(body)
        self.traceparents.append(request.headers.get("traceparent", ""))
        if self.fail_posts:
            self.fail_posts -= 1
            return _error(500, "the engine failed")
        sampling = body["sampling_params"] if is_generate else body
        if len(tokens) + sampling["max_tokens"] > self.context_tokens:
            return _error(400, f"at most {self.context_tokens} tokens")
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            kept = self.peers[params["remote_engine_id"]].kept.pop(params["remote_request_id"], None)
            if kept != tokens:
                return _error(500, "the KV belongs to another prompt")
            self.loaded_tokens += len(tokens) - 1
        if not body["stream"]:
            return await self._whole(body, tokens, params)
        return await self._stream(request, tokens, sampling)

    async def _whole(self, body: dict[str, Any], tokens: list[int], params: dict[str, Any]) -> web.Response:
        self.began.set()
        if not self.free_tokens:
            await self.gate.wait()
        told = None
        if params.get("do_remote_decode"):
            if not self.forgets:
                self.kept[body["request_id"]] = tokens
            told = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.name,
                "remote_request_id": body["request_id"],
                "remote_block_ids": [list(range(-(-len(tokens) // BLOCK_TOKENS)))],
            }
        choice = {"index": 0, "token_ids": [next_token(tokens)], "finish_reason": "length"}
        return web.json_response({"choices": [choice], "kv_transfer_params": told})

    async def _stream(self, request: web.Request, tokens: list[int], sampling: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        known, most = list(tokens), min(self.ends_after, sampling["max_tokens"] + self.more_tokens)
        self.open_streams += 1
        try:
            for number in range(1, most + 1):
                if number > self.free_tokens:
                    await self.gate.wait()
                if self.break_after is not None and number > self.break_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                known.append(next_token(known))
                is_stop = known[-1] in sampling["stop_token_ids"] and number > sampling["min_tokens"]
                reason = "stop" if is_stop else "length" if number == most else None
                await response.write(_event({"index": 0, "token_ids": known[-1:], "finish_reason": reason}))
                self.began.set()
                await asyncio.sleep(0)  # streams take turns
                if reason:
                    break
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.closed += 1
            self.hung_up.set()
            self._note_left()
            raise
        finally:
            self.open_streams -= 1
        return response


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + web.json_response({"request_id": "r", "choices": [choice]}).body + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": status}}, status=status)


@asynccontextmanager
async def servers(*fakes: FakeVllm) -> AsyncIterator[None]:
    """Run servers that can load KV from each other."""
    for fake in fakes:
        fake.peers = {other.name: other for other in fakes}
        await fake.start()
    try:
        yield
    finally:
        for fake in fakes:
            await fake.close()


async def _serve(port: int) -> None:
    """Run one server until this process ends."""
    key = os.environ.get("VLLM_API_KEY", "")
    await FakeVllm(started_s=float(os.getpid()), api_key=key, free_tokens=5).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[sys.argv.index("--port") + 1])))
