"""Proxies to compare Baton with: `_vllm_proxy.py turns|toy PORT URL URL`, before two vLLM servers.

`turns` deals requests to the servers in turn. `toy` sends each prompt to the first server for one token, with the
parameters by which a server hands its KV off, and then the request with the answer's parameters to the second one.
"""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any
from uuid import uuid4

import aiohttp
from aiohttp import web

from baton.integrations.vllm.wire import ASK_FOR_KV

_KEPT_S = 2.0
"""Idle connections are closed before vLLM closes them (after 5 s): a request on one that it closes is lost."""


class Proxy:
    """Answers requests for completions."""

    def __init__(self, kind: str, servers: list[str], session: aiohttp.ClientSession) -> None:
        self._is_toy = kind == "toy"
        self._servers = servers
        self._turns = cycle(servers)
        self._session = session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        headers = {"x-request-id": uuid4().hex}
        server = next(self._turns)
        if self._is_toy:
            server, body = self._servers[1], await self._prefilled(body, headers)
        async with self._session.post(f"{server}{request.path}", json=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        return response

    async def _prefilled(self, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        """Let the first server compute the prompt. Return the request for the second one."""
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASK_FOR_KV}
        first.pop("stream_options", None)
        first.pop("min_tokens", None)
        url = f"{self._servers[0]}/v1/completions"
        async with self._session.post(url, json=first, headers=headers) as answer:
            answer.raise_for_status()
            handed = (await answer.json()).get("kv_transfer_params")
        return {**body, "kv_transfer_params": handed} if handed else body


async def app(kind: str, servers: list[str]) -> web.Application:
    made = web.Application()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
    session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    made.router.add_post("/v1/completions", Proxy(kind, servers, session).answer)
    return made


if __name__ == "__main__":
    web.run_app(app(sys.argv[1], sys.argv[3:]), host="127.0.0.1", port=int(sys.argv[2]), print=None)
