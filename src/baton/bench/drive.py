"""Send the requests of a load on time, and keep what became of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.bench.client import Client, Reply
from baton.bench.clock import now_s
from baton.bench.probe import Target
from baton.bench.wire import request_body
from baton.workload.prompts import PromptMaker
from baton.workload.request import TraceRequest

PREPARED_BYTES_MAX = 64 * 1024 * 1024
"""Bodies that are made ahead of their time, so that making one delays no other."""
_MARGIN_S = 0.01
"""No body is made when one is due sooner than this."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, ready to be sent."""

    index: int
    request: TraceRequest
    body: bytes


@dataclass(slots=True, kw_only=True)
class Driver:
    """Sends requests to one target. `replies` grows as answers end, so an interrupted run keeps what it has."""

    client: Client
    target: Target
    prompts: PromptMaker
    ignore_eos: bool
    on_reply: Callable[[Reply], None] = lambda reply: None
    replies: list[Reply] = field(default_factory=list[Reply])

    async def closed_loop(self, requests: Sequence[TraceRequest], concurrency: int) -> None:
        """Let this many clients each send the next request as soon as its last one was answered."""
        upcoming = iter(enumerate(requests))

        async def one_client() -> None:
            for index, request in upcoming:
                await self._fire(self._prepare(index, request), None)

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(requests))):
                clients.create_task(one_client())

    async def open_loop(self, requests: Sequence[TraceRequest]) -> None:
        """Send each request at its `at_s`, whatever is still unanswered: as many are open as the server is slow."""
        upcoming = deque(enumerate(requests))
        ready: deque[Shot] = deque()
        ready_bytes = 0
        start_s: float | None = None
        async with asyncio.TaskGroup() as open_requests:
            while upcoming or ready:
                while upcoming and (
                    not ready or (ready_bytes < PREPARED_BYTES_MAX and _idle(start_s, ready[0].request))
                ):
                    ready.append(self._prepare(*upcoming.popleft()))
                    ready_bytes += len(ready[-1].body)
                    await asyncio.sleep(0)  # answers are read between two prompts
                start_s = now_s() if start_s is None else start_s
                shot = ready.popleft()
                ready_bytes -= len(shot.body)
                due_s = start_s + shot.request.at_s
                await asyncio.sleep(max(0.0, due_s - now_s()))
                open_requests.create_task(self._fire(shot, due_s))

    def _prepare(self, index: int, request: TraceRequest) -> Shot:
        prompt = (
            self.prompts.token_ids(request, index)
            if self.target.prompt_format == "ids"
            else self.prompts.text(request, index)
        )
        body = request_body(
            model=self.target.model,
            endpoint=self.target.endpoint,
            prompt=prompt,
            output_tokens=request.output_tokens,
            ignore_eos=self.ignore_eos,
        )
        return Shot(index, request, body)

    async def _fire(self, shot: Shot, due_s: float | None) -> None:
        reply = await self.client.ask(self.target.path, shot.body, request=shot.request, index=shot.index, due_s=due_s)
        self.replies.append(reply)
        self.on_reply(reply)


def _idle(start_s: float | None, upcoming: TraceRequest) -> bool:
    """Nothing is due so soon that making a prompt could delay it."""
    return start_s is None or start_s + upcoming.at_s - now_s() > _MARGIN_S
