"""The scheduler of one worker, as a state machine: commands in, steps out, results in, reports out.

`apply` takes what the server and the host pool say, `plan` decides the next step, `commit` books its result, and
`take_report` hands out everything that has to be said. It never waits: a request that lacks blocks is left out of the
step, and the question for more is asked one step ahead.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from baton.control.lane import Lane
from baton.core.config import BatchLimits
from baton.core.messages import (
    BatcherEvent,
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PreemptRequest,
    PrefillFinished,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    Shutdown,
    StartRequest,
    StepReport,
    StopRequest,
    WorkerCommand,
)
from baton.core.step import Slice, SliceResult, Step, StepResult
from baton.core.types import BlockHash, HostId, OutputToken, RequestId, Role, WorkerId, WorkerView, unpack_tokens
from baton.policy.batching import BatchingPolicy
from baton.policy.fairness import FairnessPolicy

LOOKAHEAD_TOKENS = 4
"""A decoding request asks for its next block this many tokens before it needs it, so that the answer is never late."""


@dataclass(slots=True)
class _News:
    """What has happened since the last report."""

    tokens: list[OutputToken] = field(default_factory=list[OutputToken])
    events: list[BatcherEvent] = field(default_factory=list[BatcherEvent])
    started: list[RequestId] = field(default_factory=list[RequestId])


class Batcher:
    """Continuous batching with chunked prefill over blocks that the host pool grants on demand."""

    def __init__(
        self,
        view: WorkerView,
        *,
        block_tokens: int,
        limits: BatchLimits,
        batching: BatchingPolicy,
        fairness: FairnessPolicy,
    ) -> None:
        self.worker: WorkerId = view.id
        self.host: HostId = view.host
        self.role: Role = view.role
        self.closed = False
        self._block_tokens = block_tokens
        self._limits = limits
        self._batching = batching
        self._fairness = fairness
        self._lanes: dict[RequestId, Lane] = {}
        self._waiting: list[Lane] = []
        self._ready: list[Lane] = []
        self._news = _News()

    # ---- commands in

    def apply(self, commands: Sequence[WorkerCommand]) -> None:
        """Take what the server and the host pool say, between two steps. Words about abandoned attempts are dropped."""
        for command in commands:
            match command:
                case StartRequest():
                    self._start(command)
                case StopRequest(request_id=request_id, attempt=attempt):
                    lane = self._find(request_id, attempt)
                    if lane is not None:
                        self._forget(lane)
                        self._say(RequestDropped(request_id, attempt, self.worker, preempted=False))
                case BlocksGranted():
                    self._grant(command)
                case PreemptRequest(request_id=request_id, attempt=attempt):
                    lane = self._find(request_id, attempt)
                    if lane is not None:
                        self._preempt(lane)
                case Shutdown():
                    self.closed = True
                case _:
                    assert_never(command)

    def _start(self, command: StartRequest) -> None:
        old = self._lanes.get(command.request.id)
        if old is not None:
            if old.attempt >= command.attempt:
                return  # said twice
            self._forget(old)
        lane = Lane(
            request=command.request,
            attempt=command.attempt,
            tokens=unpack_tokens(command.tokens),
            until=command.until,
            block_tokens=self._block_tokens,
            key=self._fairness.key(command.request),
            hashes=list(command.request.block_hashes),
        )
        self._lanes[lane.request.id] = lane
        if command.block_table:
            lane.hold(command.block_table, command.computed_tokens)
            insort(self._ready, lane, key=_order)
        else:
            insort(self._waiting, lane, key=_order)

    def _find(self, request_id: RequestId, attempt: int) -> Lane | None:
        lane = self._lanes.get(request_id)
        return lane if lane is not None and lane.attempt == attempt else None

    def _grant(self, command: BlocksGranted) -> None:
        lane = self._find(command.request_id, command.attempt)
        if lane is None:
            return
        if lane.state == "ready":
            if len(command.block_table) > len(lane.table):
                lane.table = list(command.block_table)
            return
        if lane.state == "waiting":
            return  # an answer from before a preemption
        lane.hold(command.block_table, command.cached_blocks * self._block_tokens)
        self._waiting.remove(lane)
        insort(self._ready, lane, key=_order)

    def _preempt(self, lane: Lane) -> None:
        if lane.state == "ready":
            self._ready.remove(lane)
            insort(self._waiting, lane, key=_order)
        lane.empty()
        self._say(RequestDropped(lane.request.id, lane.attempt, self.worker, preempted=True))

    def _forget(self, lane: Lane) -> None:
        del self._lanes[lane.request.id]
        (self._ready if lane.state == "ready" else self._waiting).remove(lane)

    def _say(self, event: BatcherEvent) -> None:
        self._news.events.append(event)

    # ---- steps out

    def plan(self) -> Step:
        """Decide the next forward pass. A step without slices means that there is nothing to do now."""
        self._ask_for_first_blocks()
        for lane in self._ready:
            self._ask_ahead(lane)
        chosen = self._batching.select(self._ready, self._limits)
        return Step(tuple(self._slice(self._ready[index], count) for index, count in chosen))

    def _ask_for_first_blocks(self) -> None:
        """Ask for the requests that could be in the next steps, oldest first; not for more than those.

        Asked late, a request hits what was sealed meanwhile. For the same reason one waits while a neighbour in this
        batcher computes the better part of its prompt.
        """
        if not self._waiting:
            return
        asking = [lane for lane in self._waiting if lane.state == "asking"]
        tokens = sum(lane.remaining_tokens for lane in asking)
        tokens += sum(lane.remaining_tokens for lane in self._ready if lane.remaining_tokens > 1)
        room = self._limits.requests_max - len(self._ready) - len(asking)
        if room <= 0:
            return
        here = {name for lane in self._ready for name in lane.hashes[: lane.sealed_blocks]}
        soon = self._being_computed([*self._ready, *asking]) - here
        for lane in self._waiting:
            if room <= 0 or tokens >= 2 * self._limits.step_tokens_max:
                return
            if lane.state != "waiting" or _worth_waiting(lane, soon):
                continue
            lane.state = "asking"
            lane.asked_blocks = lane.blocks_for(len(lane.tokens) + LOOKAHEAD_TOKENS)
            self._say(self._want(lane, lane.prefix()))
            soon |= self._being_computed([lane]) - here
            room -= 1
            tokens += lane.remaining_tokens

    def _being_computed(self, lanes: Sequence[Lane]) -> set[BlockHash]:
        return {
            name for lane in lanes for name in lane.hashes[lane.sealed_blocks : len(lane.tokens) // self._block_tokens]
        }

    def _ask_ahead(self, lane: Lane) -> None:
        blocks = lane.blocks_for(len(lane.tokens) + LOOKAHEAD_TOKENS)
        if blocks > lane.asked_blocks:
            lane.asked_blocks = blocks
            self._say(self._want(lane, ()))

    def _want(self, lane: Lane, prefix: tuple[BlockHash, ...]) -> BlocksWanted:
        return BlocksWanted(lane.request.id, lane.attempt, self.worker, lane.asked_blocks, prefix)

    def _slice(self, lane: Lane, count: int) -> Slice:
        if not lane.started:
            lane.started = True
            self._news.started.append(lane.request.id)
        return Slice(
            request_id=lane.request.id,
            tokens=lane.tokens,
            start=lane.computed_tokens,
            count=count,
            block_table=lane.table,
            sample=count == lane.remaining_tokens,
            sampling=lane.request.sampling,
            prompt_tokens=lane.request.prompt_tokens,
        )

    # ---- results in, reports out

    def commit(self, step: Step, result: StepResult) -> None:
        """Book a step's result: computed tokens, sealed blocks, new tokens, ends."""
        for part, outcome in zip(step.slices, result.slices, strict=True):
            self._book(self._lanes[part.request_id], part.count, outcome)

    def fail(self, part: Slice, reason: str) -> None:
        """Give up the request of a slice that the engine cannot compute."""
        lane = self._lanes[part.request_id]
        self._forget(lane)
        self._say(RequestFailed(part.request_id, lane.attempt, self.worker, reason))

    def _book(self, lane: Lane, count: int, outcome: SliceResult) -> None:
        lane.computed_tokens += count
        lane.prompt_logprobs.extend(outcome.prompt_logprobs)
        if outcome.token is not None:
            lane.tokens.append(outcome.token)
        first, hashes = lane.seal()
        if hashes:
            self._say(BlocksSealed(lane.request.id, lane.attempt, self.worker, first, hashes))
        if outcome.token is not None:
            self._emit(lane, outcome)

    def _emit(self, lane: Lane, outcome: SliceResult) -> None:
        assert outcome.token is not None
        request_id, index = lane.request.id, lane.output_tokens - 1
        prompt_logprobs = tuple(lane.prompt_logprobs) if index == 0 else ()
        self._news.tokens.append(
            OutputToken(
                request_id, lane.attempt, index, outcome.token, outcome.logprob, prompt_logprobs, outcome.embedding
            )
        )
        reason = lane.finish_reason()
        if reason is not None:
            self._forget(lane)
            self._say(RequestFinished(request_id, lane.attempt, self.worker, reason))
        elif lane.until == "first_token":
            self._forget(lane)
            self._say(PrefillFinished(request_id, lane.attempt, self.worker, lane.computed_tokens))

    def take_report(self, *, now_s: float, step_s: float = 0.0) -> StepReport | None:
        """Hand out all that there is to say since the last time; None for nothing."""
        news, self._news = self._news, _News()
        if not (news.tokens or news.events or news.started or step_s):
            return None
        return StepReport(
            worker=self.worker,
            tokens=tuple(news.tokens),
            events=tuple(news.events),
            view=self.view(now_s),
            step_s=step_s,
            started=tuple(news.started),
        )

    def view(self, now_s: float) -> WorkerView:
        """Describe the load."""
        return WorkerView(
            id=self.worker,
            host=self.host,
            role=self.role,
            running_requests=len(self._ready),
            waiting_requests=len(self._waiting),
            queued_tokens=sum(lane.remaining_tokens for lane in self._lanes.values() if lane.remaining_tokens > 1),
            context_tokens=sum(lane.computed_tokens for lane in self._ready),
            observed_at_s=now_s,
        )


def _worth_waiting(lane: Lane, soon: set[BlockHash]) -> bool:
    """A hit on half of the prompt is worth a step's delay; one on the chat template that all prompts share is not."""
    shared = sum(name in soon for name in lane.prefix())
    return 2 * shared * lane.block_tokens >= lane.remaining_tokens


def _order(lane: Lane) -> tuple[tuple[float, ...], RequestId]:
    return (lane.key, lane.request.id)
