"""One server of another engine as a worker: each request that the batcher runs is sent to the server over HTTP.

The batcher is the one of Baton's own workers. It asks the host pool for blocks, orders waiting requests, and reports
events. The server has its own scheduler and KV cache; the pool of its host mirrors that cache. A request is sent to
the server with its tokens so far, and each token that arrives is committed as a step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec

from baton.core.config import BatchLimits
from baton.core.messages import (
    BatcherEvent,
    PrefillFinished,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    StartRequest,
    StepReport,
    WorkerCommand,
)
from baton.core.ports import CostModel
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import RequestId, WorkerId, WorkerView
from baton.decide.control.batcher import Batcher
from baton.decide.policy.batching import Candidate
from baton.integrations.engines.handoffs import ComputedPrompt, Handoffs
from baton.integrations.engines.legs import OpenLeg
from baton.integrations.engines.port import (
    EngineBrokenError,
    EngineLoad,
    EngineRefusedError,
    EngineServer,
    Generation,
)
from baton.move.clock import now_s
from baton.serve.host.tasks import spawn

_TRIES_MAX = 3
"""Consecutive attempts without a new token after which a request fails."""
FAILED_REQUESTS_MAX = 3
"""Requests that fail in a row before the server is suspected of failing all. Short prompts then tell."""
_RETRY_S = 0.2
"""Pause before a request is sent again. It doubles with every further attempt."""
_NO_LOAD = EngineLoad()

log = logging.getLogger("baton.server")


class WholeRequests:
    """A batching policy for engines with their own scheduler: it selects every request that has blocks, completely."""

    def select(self, candidates: Sequence[Candidate], limits: BatchLimits, cost: CostModel) -> list[tuple[int, int]]:
        return [
            (index, each.remaining_tokens)
            for index, each in enumerate(candidates)
            if 0 < each.remaining_tokens <= each.room_tokens
        ]


class EngineListener(Protocol):
    """Receives the reports of a worker."""

    def report(self, report: StepReport) -> None: ...

    def suspect(self, worker: WorkerId, error: EngineBrokenError) -> None:
        """Check the worker's server, because a request to it has failed."""
        ...

    def note_partner(self, server: EngineServer, *, has_failed: bool) -> None:
        """Note that a request has failed in each attempt, or was answered, whose other leg was on this server."""
        ...

    async def partner(self, worker: WorkerId, request_id: RequestId) -> EngineServer | None:
        """Return the server for the other leg of a request on this worker.

        For a prefill worker, it is the chosen decode server, and None if that has not joined. A decode worker waits for
        a prefill server. Raises EngineRefusedError if it has waited for `survival.wait_s`.
        """
        ...


@dataclass(slots=True)
class _Run:
    """One attempt to run a request on the server."""

    start: StartRequest
    generation: Generation
    leg: OpenLeg | None = None
    """The answer, which has begun before this worker was told to decode. None: the request is sent now."""
    task: asyncio.Task[None] | None = None
    arrived: deque[int] = field(default_factory=deque[int])
    """Tokens that are not committed yet."""
    is_prefilled: bool = False
    """The server has computed the prompt and keeps its KV."""
    is_over: bool = False
    """The server has ended the answer."""
    may_be_sent_again: bool = False
    """The attempt has failed, and the pause after it is over."""
    failure: str = ""


class EngineWorker:
    """Runs the requests of one worker on a server of another engine. Implements `WorkerLink`."""

    def __init__(
        self, view: WorkerView, batcher: Batcher, server: EngineServer, handoffs: Handoffs, listener: EngineListener
    ) -> None:
        self.view = view
        self.state = "ready"
        self.pid = 0
        self.attention_backend = ""
        self._batcher = batcher
        self._server = server
        self._handoffs = handoffs
        self._listener = listener
        self._inbox: list[WorkerCommand] = []
        self._is_turn_due = False
        self._starts: dict[RequestId, StartRequest] = {}
        self._runs: dict[RequestId, _Run] = {}
        self._failures: dict[RequestId, int] = {}
        """Failed attempts of each request since its last token."""
        self._failed_requests = 0
        """Requests that have failed since the last answer. Those that the server rejects as invalid do not count."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._serials = itertools.count()
        self._load = _NO_LOAD

    @property
    def requests(self) -> int:
        """Number of requests that were sent to the server and have not ended."""
        return len(self._runs)

    @property
    def is_failing(self) -> bool:
        return self._failed_requests >= FAILED_REQUESTS_MAX

    def send(self, message: WorkerCommand) -> None:
        """Queue a command. It is applied in the next turn of the event loop, after the driver's current event."""
        if self.state == "ready":
            self._inbox.append(message)
            self._take_turn_soon()

    def note_answer(self) -> None:
        """Note that the server has answered a request."""
        self._failed_requests = 0

    def note_failure(self) -> None:
        """Note that a request has failed on the server in each of its attempts."""
        self._failed_requests += 1

    def stop(self) -> None:
        """End all requests to the server and report nothing any more, because the server is lost or Baton ends."""
        self.state = "lost"
        for task in self._tasks:
            task.cancel()
        self._runs.clear()

    def note_load(self, load: EngineLoad) -> None:
        """Report the load that the server measures, if it has changed. It includes requests of other clients."""
        if load != self._load and self.state == "ready":
            self._load = load
            view = self._with_engine_load(self._batcher.view(now_s()))
            self._listener.report(StepReport(self.view.id, (), (), view))

    # ---- turns

    def _take_turn_soon(self) -> None:
        if not self._is_turn_due and self.state == "ready":
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Apply commands, commit the tokens that have arrived, send new requests, and report."""
        self._is_turn_due = False
        if self.state != "ready":
            return
        commands, self._inbox = self._inbox, []
        for command in commands:
            if isinstance(command, StartRequest):
                self._note_start(command)
        self._batcher.apply(commands)
        step = self._batcher.plan(now_s())
        while self._commit(step):
            step = self._batcher.plan(now_s())
        report = self._batcher.take_report(now_s=now_s())
        for event in report.events if report is not None else ():
            self._settle(event)
        for part in step.slices:
            run = self._runs.get(part.request_id)
            if part.request_id in self._starts and (run is None or run.may_be_sent_again):
                self._begin(part)
        if report is not None:
            self._listener.report(msgspec.structs.replace(report, view=self._with_engine_load(report.view)))

    def _note_start(self, start: StartRequest) -> None:
        """Note a new attempt of a request, and abort the request to the server for an earlier attempt."""
        known = self._starts.get(start.request.id)
        if known is None or known.attempt < start.attempt:
            self._abort(start.request.id)
            self._starts[start.request.id] = start

    def _commit(self, step: Step) -> bool:
        """Commit one result (token, prompt or failure) of each request that has one. Return whether any had."""
        parts: list[Slice] = []
        results: list[SliceResult] = []
        for part in step.slices:
            run = self._runs.get(part.request_id)
            result = _result(run, part) if run is not None else None
            if result is not None:
                parts.append(part)
                results.append(result)
        if parts:
            self._batcher.commit(Step(tuple(parts)), StepResult(results))
        return bool(parts)

    def _settle(self, event: BatcherEvent) -> None:
        """After an event of the batcher, end the request to the server if the batcher does not run it any more."""
        match event:
            case RequestFinished() | PrefillFinished():
                self._runs.pop(event.request_id, None)  # the server ends it too, by the same limits
                self._forget(event.request_id)
            case RequestDropped(preempted=True):
                self._abort(event.request_id)
            case RequestDropped() | RequestFailed():
                self._abort(event.request_id)
                self._forget(event.request_id)
            case _:
                pass

    def _forget(self, request_id: RequestId) -> None:
        self._starts.pop(request_id, None)
        self._failures.pop(request_id, None)

    def _with_engine_load(self, view: WorkerView) -> WorkerView:
        load = self._load
        return msgspec.structs.replace(
            view,
            waiting_requests=view.waiting_requests + load.waiting_requests,
            context_tokens=max(view.context_tokens, int(load.kv_used_ratio * load.kv_tokens)),
        )

    # ---- requests to the server

    def _begin(self, part: Slice) -> None:
        """Send a request to the server, with all of its tokens so far."""
        start = self._starts[part.request_id]
        request, begun = start.request, len(part.tokens) - part.prompt_tokens
        hands_off = start.until != "end"
        kept = None if hands_off else self._handoffs.take(request.id, len(part.tokens), self._server)
        leg = kept.leg if kept is not None else None
        generation = Generation(
            id=f"{request.id}-{start.attempt}-{next(self._serials)}",
            tokens=tuple(part.tokens),
            output_tokens=begun,
            tokens_max=request.output_tokens_max - begun,
            sampling=part.sampling,
            cache_salt=request.cache_salt if request.shares_blocks else request.id,
            hands_off=hands_off,
            kv_transfer_params=kept.params if kept is not None else None,
            traceparent=request.traceparent,
        )
        run = self._runs[request.id] = _Run(start, leg.generation if leg is not None else generation, leg)
        run.task = self._spawn(self._run(run))

    async def _run(self, run: _Run) -> None:
        try:
            if self._server.is_paired and run.leg is None:
                partner = await self._listener.partner(self.view.id, run.start.request.id)
                run.generation = replace(run.generation, partner=partner)
            if run.generation.hands_off:
                await self._prefill(run)
            else:
                await self._stream(run)
        except EngineRefusedError as error:
            run.failure = str(error)
        except EngineBrokenError as error:
            await self._try_again(run, error)
        self._take_turn_soon()

    async def _prefill(self, run: _Run) -> None:
        """Compute a prompt. The server also returns a token, which is used only if this worker draws the first one."""
        answer = await self._server.prefill(run.generation)
        if run.start.until == "first_token":
            run.arrived.extend(answer.tokens)
        tokens = len(run.generation.tokens)
        prompt = ComputedPrompt(self.view.host, tokens, answer.kv_transfer_params, answer.leg)
        if self._is_current(run):
            self._handoffs.keep(run.start.request.id, prompt)
        elif answer.leg is not None:
            answer.leg.cancel()
        run.is_prefilled = True
        self.note_answer()  # the partner must answer too

    async def _stream(self, run: _Run) -> None:
        reason = None
        answer = run.leg.choices() if run.leg is not None else self._server.stream(run.generation)
        async with aclosing(answer) as choices:
            async for choice in choices:
                reason = choice.finish_reason or reason
                if not choice.token_ids:
                    continue
                if not self._is_current(run):
                    return  # the batcher has ended the request: closing the stream stops the server
                self._failures.pop(run.start.request.id, None)
                self.note_answer()
                self._note_partner(run, has_failed=False)
                run.arrived.extend(choice.token_ids)
                self._take_turn_soon()
        if reason not in ("stop", "length"):
            raise EngineBrokenError(f"the stream ended with the finish reason {reason}")
        run.is_over = True

    async def _try_again(self, run: _Run, error: EngineBrokenError) -> None:
        """Let the listener check the server. Allow another attempt after a pause, or fail the request."""
        self._listener.suspect(self.view.id, error)
        if not self._is_current(run):
            return
        request_id = run.start.request.id
        tries = self._failures[request_id] = self._failures.get(request_id, 0) + 1
        if tries >= _TRIES_MAX:
            self.note_failure()
            self._note_partner(run, has_failed=True)
            run.failure = f"the server {self._server.url} failed {tries} times on this request: {error}"
            return
        log.warning("%s: request %s is sent again: %s", self.view.id, request_id, error)
        await asyncio.sleep(_RETRY_S * 2 ** (tries - 1))
        run.may_be_sent_again = True

    def _note_partner(self, run: _Run, *, has_failed: bool) -> None:
        if run.generation.partner is not None:
            self._listener.note_partner(run.generation.partner, has_failed=has_failed)

    def _is_current(self, run: _Run) -> bool:
        return self._runs.get(run.start.request.id) is run

    def _abort(self, request_id: RequestId) -> None:
        """End a request on the server: close its connection, and abort it by id in case the server misses that."""
        run = self._runs.pop(request_id, None)
        if run is None or run.task is None or run.task.done():
            return
        run.task.cancel()
        self._spawn(self._tell_abort(run.generation.id))

    async def _tell_abort(self, generation_id: str) -> None:
        try:
            await self._server.abort(generation_id)
        except (EngineBrokenError, EngineRefusedError) as error:
            log.info("%s: %s was not aborted by name: %s", self.view.id, generation_id, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = spawn(work, partial(log.error, "%s"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _result(run: _Run, part: Slice) -> SliceResult | None:
    """Return the next result for a slice from the server. None: there is none yet."""
    if part.sample and run.arrived:
        return SliceResult(token=run.arrived.popleft())
    if run.is_prefilled and not part.sample:
        return SliceResult()
    if run.failure:
        return SliceResult(failure=run.failure)
    if run.is_over or run.is_prefilled:
        begun = len(part.tokens) - part.prompt_tokens
        return SliceResult(failure=f"the server ended the answer after {begun} tokens, before its stop token or limit")
    return None
