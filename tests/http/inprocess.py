"""A gateway over one step engine in the test's own process: no workers, no prefix cache, no policies.

The tests of the HTTP routes run over it. Waiting requests get blocks in order of arrival; all running requests share
each step. A test calls `admit` and `step` itself where it needs a certain order of events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from baton.compute.models.card import ModelCard
from baton.compute.step_engine import StepEngine
from baton.core.errors import RequestError
from baton.core.step import Slice, Step
from baton.core.types import BlockId, FinishReason, HostId, OutputToken, Request, RequestId, Role, Slo, WorkerId
from baton.move.clock import now_s
from baton.serve.live.joined_host import JoinedHost
from baton.serve.live.live_request import Finish, LiveRequest, Timings, Update
from baton.serve.live.status import ClusterStatus, HostStatus, WorkerStatus
from baton.serve.messages.hosting import HostTerms

WORKER = "inprocess-0"


class InProcessGeneration:
    """A request of an `InProcessGateway`."""

    def __init__(self, request: Request, prompt: Sequence[int]) -> None:
        self.request = request
        self.tokens = list(prompt)
        self.block_table: list[BlockId] = []
        self.computed_tokens = 0
        self.finish: Finish | None = None
        self.sent_tokens = 0
        self._news: list[OutputToken] = []
        self._wake = asyncio.Event()
        self._first_sent_at_s: float | None = None
        self._last_sent_at_s: float | None = None

    async def next(self) -> Update:
        while not self._news and self.finish is None:
            self._wake.clear()
            await self._wake.wait()
        news, self._news = tuple(self._news), []
        return Update(tokens=news, finish=self.finish)

    def mark_sent(self, tokens: int) -> None:
        self.sent_tokens += tokens
        self._last_sent_at_s = now_s()
        self._first_sent_at_s = self._first_sent_at_s or self._last_sent_at_s

    def timings(self) -> Timings:
        first, last, arrived = self._first_sent_at_s, self._last_sent_at_s, self.request.arrived_at_s
        if first is None or last is None:
            return Timings()
        tpot_s = (last - first) / (self.sent_tokens - 1) if self.sent_tokens > 1 else None
        return Timings(ttft_s=first - arrived, tpot_s=tpot_s, e2e_s=last - arrived, prefill_worker=WORKER)

    def end(self, finish: Finish) -> None:
        """End the request. Later calls change nothing."""
        if self.finish is None:
            self.finish = finish
            self._wake.set()

    def add(self, token: OutputToken) -> None:
        """Add an output token, and end the request if it is the last one."""
        self.tokens.append(token.token)
        self._news.append(token)
        if reason := self._end_reason(token):
            self.end(Finish(outcome="finished", reason=reason))
        self._wake.set()

    def _end_reason(self, token: OutputToken) -> FinishReason | None:
        if token.token in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if token.index + 1 == self.request.output_tokens_max else None


class InProcessFleet:
    """The fleet of one worker, whose role can change."""

    def __init__(self, gateway: InProcessGateway) -> None:
        self._gateway = gateway
        self._wanted: dict[Role, int] = {}

    def set_role(self, worker: WorkerId, role: Role) -> None:
        if worker != WORKER:
            raise RequestError(f"there is no worker {worker!r}; see /cluster", param="worker", status=404)
        self._gateway.role = role

    def restart(self, workers: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
        if unknown := [worker for worker in workers if worker != WORKER]:
            raise RequestError(f"there is no worker {unknown[0]!r}; see /cluster", param="workers", status=404)
        return ()

    def scale(self, role: Role, workers: int | None) -> dict[Role, int]:
        self._wanted = {role: workers} if workers is not None else {}
        return self._wanted


class InProcessGateway:
    """Gateway over one step engine. `run` computes; without it requests only wait."""

    def __init__(self, card: ModelCard, engine: StepEngine, *, blocks: int, waiting_max: int = 1024) -> None:
        """Use an engine whose memory holds `blocks` KV blocks. Reject requests beyond `waiting_max` waiting ones."""
        self.card = card
        self.role: Role = "mixed"
        self.fleet = InProcessFleet(self)
        self.state = "ready"
        self._engine = engine
        self._blocks = blocks
        self._free = [BlockId(block) for block in range(blocks)]
        self._waiting: deque[InProcessGeneration] = deque()
        self.running: list[InProcessGeneration] = []
        self._waiting_max = waiting_max
        self.slo: Slo | None = None
        self.pace_s = 0.0
        """Pause after each step, for streams that take long."""
        self._work = asyncio.Event()
        self.live: dict[RequestId, LiveRequest] = {}
        """Stays empty: an operator sees only requests of the driver."""
        self.members: dict[HostId, JoinedHost] = {}

    @property
    def request_tokens_max(self) -> int:
        return min(self.card.context_tokens, self._blocks * self._engine.layout.block_tokens)

    def missing(self) -> str:
        return ""

    def submit(self, request: Request, prompt: Sequence[int]) -> InProcessGeneration:
        generation = InProcessGeneration(request, prompt)
        if len(self._waiting) >= self._waiting_max:
            message = f"{len(self._waiting)} requests are waiting, at most {self._waiting_max} may; come again later"
            generation.end(Finish(outcome="rejected", reject="queue_full", message=message, retry_after_s=0.5))
        else:
            self._waiting.append(generation)
            self._work.set()
        return generation

    def finish(self, generation: InProcessGeneration) -> None:
        generation.end(Finish(outcome="finished", reason="stop"))

    def cancel(self, generation: InProcessGeneration) -> None:
        generation.end(Finish(outcome="cancelled"))

    def mark_sent(self, generation: InProcessGeneration, tokens: int) -> None:
        generation.mark_sent(tokens)

    @property
    def decision_log(self) -> None:
        return None

    async def terms(self) -> HostTerms:
        raise RequestError("this server is one process and takes no other hosts", status=409, code="no_hosts")

    def cluster(self) -> ClusterStatus:
        layout, free = self._engine.layout, len(self._free)
        used = self._blocks - free
        worker = WorkerStatus(
            id=WORKER,
            role=self.role,
            pid=0,
            state="ready",
            running=len(self.running),
            waiting=len(self._waiting),
            kv_blocks_used=used,
            kv_blocks_total=self._blocks,
        )
        host = HostStatus(
            id="inprocess",
            kv_blocks_total=self._blocks,
            kv_blocks_free=free,
            kv_blocks_used=used,
            kv_blocks_cached=0,
            kv_block_tokens=layout.block_tokens,
            kv_block_bytes=layout.block_bytes,
        )
        return ClusterStatus(workers=(worker,), hosts=(host,), policy={})

    async def run(self) -> None:
        """Run steps until the task is cancelled. Without work it waits."""
        while True:
            self.admit()
            if not self.running:
                self._work.clear()
                await self._work.wait()
                continue
            self.step()
            await asyncio.sleep(self.pace_s)  # the HTTP routes send the tokens of this step

    def step(self) -> None:
        """Compute one step of all running requests, and release the blocks of the finished ones."""
        self._release()
        result = self._engine.execute(Step(tuple(_next_slice(generation) for generation in self.running)))
        for generation, part in zip(self.running, result.slices, strict=True):
            if part.failure:
                generation.end(Finish(outcome="failed", message=part.failure))
                continue
            generation.computed_tokens = len(generation.tokens) - (part.token is None)
            if part.token is None:  # its token mask is late
                continue
            prompt_tokens = generation.request.prompt_tokens
            index = len(generation.tokens) - prompt_tokens
            found = (part.token, part.logprob, part.prompt_logprobs, part.embedding)
            generation.add(OutputToken(generation.request.id, 1, index, *found))
        self._release()

    def admit(self) -> None:
        """Start waiting requests in order while enough blocks are free for their longest output."""
        while self._waiting:
            generation = self._waiting[0]
            request = generation.request
            needed = -(-(request.prompt_tokens + request.output_tokens_max) // self._engine.layout.block_tokens)
            if generation.finish is None and needed > len(self._free):
                return
            self._waiting.popleft()
            if generation.finish is None:
                generation.block_table, self._free = self._free[:needed], self._free[needed:]
                self.running.append(generation)

    def _release(self) -> None:
        ended = [generation for generation in self.running if generation.finish is not None]
        for generation in ended:
            self.running.remove(generation)
            self._free += generation.block_table


def _next_slice(generation: InProcessGeneration) -> Slice:
    """Return the tokens that are not computed yet: first the prompt, then one token per step."""
    return Slice(
        request_id=generation.request.id,
        tokens=generation.tokens,
        start=generation.computed_tokens,
        count=len(generation.tokens) - generation.computed_tokens,
        block_table=generation.block_table,
        sample=True,
        sampling=generation.request.sampling,
        prompt_tokens=generation.request.prompt_tokens,
    )
