"""The scheduler of one worker, as a state machine: commands in, steps out, results in, reports out.

`apply` takes commands of the server and the host pool, `plan` decides the next step, `commit` records its result, and
`take_report` returns the accumulated report. It never blocks: a request without blocks is left out of the step, and
requests for more blocks are sent ahead of need.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from typing import assert_never

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
from baton.core.spill import BlocksSpilled, SpillBlocks, with_slots
from baton.core.step import EMPTY_STEP, LayerStream, Slice, SliceResult, Step, StepResult
from baton.core.types import BlockHash, HostId, RequestId, Role, WorkerId, WorkerView, unpack_tokens
from baton.decide.control.decode_run import DecodeRun, asks_after, plan_decode_run, room_steps, takes_turns
from baton.decide.control.lane import LOOKAHEAD_TOKENS, Lane, StepClock, in_order, load_of, share_step, with_drafts
from baton.decide.control.lane_order import LaneOrder
from baton.decide.control.report_builder import ReportBuilder
from baton.decide.cost.online import StepLearner
from baton.decide.kv.hashing import runs_per_block
from baton.decide.policy.batching import BatcherPolicies


class Batcher:
    """Continuous batching with chunked prefill over blocks that the host pool grants on demand."""

    def __init__(
        self,
        view: WorkerView,
        *,
        block_tokens: int,
        limits: BatchLimits,
        policies: BatcherPolicies,
        hash_tokens: int | None = None,
    ) -> None:
        """`hash_tokens`: number of tokens per hash of a request. None: one block."""
        self.worker: WorkerId = view.id
        self.host: HostId = view.host
        self.role: Role = view.role
        self.closed = False
        self.learner = StepLearner(policies.cost)  # the owner reports each step's duration to it
        self._block_tokens = block_tokens
        self._hash_runs = runs_per_block(block_tokens, hash_tokens or block_tokens)
        self._limits = limits
        self._growth_tokens = max(LOOKAHEAD_TOKENS, limits.growth_tokens)
        self._policies = policies
        self._order = LaneOrder(policies.fairness)
        self._lanes: dict[RequestId, Lane] = {}
        self._waiting: list[Lane] = []
        self._ready: list[Lane] = []
        self._newest: RequestId | None = None
        self._turns = 0
        """Number of planned slices."""
        self._clock = StepClock()
        self._report = ReportBuilder()
        self.spills: list[SpillBlocks] = []
        """Copies that the owner makes, and removes from this list, before it takes the report that confirms them."""
        self._has_classes = False  # whether a request with a service class has come
        self._skips = self._has_skipped = False
        """Whether the planned step, and the last one, leave out decodes for a prompt of a more urgent class."""

    @property
    def is_idle(self) -> bool:
        """True while the worker has no request."""
        return not self._lanes

    # ---- commands in

    def apply(self, commands: Sequence[WorkerCommand]) -> None:
        """Apply commands between two steps. Commands for abandoned attempts are ignored."""
        for command in commands:
            match command:
                case StartRequest():
                    self._start(command)
                case StopRequest(request_id=request_id, attempt=attempt):
                    lane = self._find(request_id, attempt)
                    if lane is not None and not (command.only_unstarted and lane.started):
                        self._forget(lane)
                        tokens, worker = lane.computed_tokens, self.worker
                        self._add_event(
                            RequestDropped(request_id, attempt, worker, preempted=False, computed_tokens=tokens)
                        )
                case BlocksGranted():
                    self._grant(command)
                case PreemptRequest(request_id=request_id, attempt=attempt):
                    lane = self._find(request_id, attempt)
                    if lane is not None:
                        self._preempt(lane)
                case SpillBlocks(request_id=request_id, attempt=attempt):
                    lane = self._find(request_id, attempt)
                    if lane is not None and lane.state == "ready":
                        lane.table = with_slots(lane.table, command.first, command.slots)
                        self.spills.append(command)
                        self._add_event(BlocksSpilled(request_id, attempt, self.worker, command.first))
                case Shutdown():
                    self.closed = True
                case _:
                    assert_never(command)

    def _start(self, command: StartRequest) -> None:
        old = self._lanes.get(command.request.id)
        if old is not None:
            if old.attempt >= command.attempt:
                return  # duplicate or stale command
            self._forget(old)
        self._newest = command.request.id
        lane = Lane(
            request=command.request,
            attempt=command.attempt,
            tokens=unpack_tokens(command.tokens),
            until=command.until,
            block_tokens=self._block_tokens,
            hash_runs=self._hash_runs,
            key=self._order.key(command.request, self._lanes.values(), self.learner.cost),
            hashes=list(command.request.block_hashes),
            stream=LayerStream(command.attempt, command.layer_groups) if command.layer_groups > 1 else None,
            clock=self._clock,
        )
        self._lanes[lane.request.id] = lane
        self._has_classes |= lane.request.service is not None
        self._report.is_load_new = True
        if command.block_table:
            lane.hold(command.block_table, command.computed_tokens)
            self._make_ready(lane)
        else:
            insort(self._waiting, lane, key=in_order)

    def _find(self, request_id: RequestId, attempt: int) -> Lane | None:
        lane = self._lanes.get(request_id)
        return lane if lane is not None and lane.attempt == attempt else None

    def _grant(self, command: BlocksGranted) -> None:
        lane = self._find(command.request_id, command.attempt)
        if lane is None or lane.state == "waiting":
            return  # the request ended or was preempted after it asked
        if lane.state == "ready":
            if len(command.block_table) > len(lane.table):
                lane.table = command.block_table
                lane.expect(max(lane.asked_blocks, len(lane.table)))
            return
        lane.hold(command.block_table, command.cached_blocks * self._block_tokens)
        self._waiting.remove(lane)
        self._make_ready(lane)
        self._report.is_load_new = True

    def _make_ready(self, lane: Lane) -> None:
        insort(self._ready, lane, key=in_order)
        if lane.is_left:
            self._hand_off(lane)

    def _preempt(self, lane: Lane) -> None:
        if lane.state == "ready":
            self._ready.remove(lane)
            insort(self._waiting, lane, key=in_order)
        lane.empty()
        self._add_event(RequestDropped(lane.request.id, lane.attempt, self.worker, preempted=True))

    def _forget(self, lane: Lane) -> None:
        del self._lanes[lane.request.id]
        (self._ready if lane.state == "ready" else self._waiting).remove(lane)

    def _add_event(self, event: BatcherEvent) -> None:
        self._report.events.append(event)
        self._report.is_load_new = True

    # ---- steps out

    def plan(self, now_s: float) -> Step:
        """Return the next step. A step without slices means that there is no work."""
        return self._step(self._choose(now_s))

    def plan_run(self, now_s: float) -> Step | DecodeRun:
        """Return the next step, or a run of equal decode steps if all chosen requests decode.

        Requires a batching policy that is a pure function of its arguments. A command that arrives ends the run.
        """
        chosen = self._choose(now_s)
        is_decode = bool(chosen) and chosen[0][1] == 1 and not self._policies.speculation.tokens_max
        if is_decode and not (self._asks_later() or takes_turns(self._ready, self._limits, len(chosen))):
            run = plan_decode_run([self._ready[index] for index, _ in chosen])
            if run is not None:
                for lane in run.lanes:
                    lane.started = True  # not reported: all of them have output tokens
                return run
        return self._step(chosen) if chosen else EMPTY_STEP

    def ask_in_run(self, run: DecodeRun) -> None:
        """Ask for the blocks that a run needs after `asks_after` steps. No step of the run is committed yet."""
        for lane in run.lanes:
            length = len(lane.tokens) + run.asks_after
            if length >= lane.grow_at_tokens:
                self._ask(lane, length)
        run.asks_after = asks_after(run.lanes)

    def widen(self, run: DecodeRun, granted: BlocksGranted) -> bool:
        """Apply a grant of blocks to a run before its steps are committed. Return False if it is for another lane."""
        lane = self._find(granted.request_id, granted.attempt)
        if lane is None or lane not in run.lanes:
            return False
        self._grant(granted)
        run.room_steps, run.asks_after = room_steps(run.lanes), asks_after(run.lanes)
        return True

    def _choose(self, now_s: float) -> list[tuple[int, int]]:
        """Ask for the blocks that are needed soon, and let the batching policy choose the step."""
        self._clock.advance(now_s)
        if self._waiting:
            self._ask_for_first_blocks()
        lanes, select, self._skips = self._ready, self._policies.batching.select, False
        for lane in lanes:
            if len(lane.tokens) >= lane.grow_at_tokens:
                self._ask(lane, len(lane.tokens))
        if not self._has_classes or all(lane.step_ratio == 1.0 for lane in lanes):
            return select(lanes, self._limits, self.learner.cost) if lanes else []
        limits, places = share_step(lanes, self._limits, may_skip=not self._has_skipped)
        self._skips = len(places) < len(lanes)
        chosen = select([lanes[place] for place in places], limits, self.learner.cost)
        return [(places[index], count) for index, count in chosen]

    def _step(self, chosen: Sequence[tuple[int, int]]) -> Step:
        lanes = [self._ready[index] for index, _ in chosen]
        step = Step(tuple(self._slice(lane, count) for lane, (_, count) in zip(lanes, chosen, strict=True)))
        return with_drafts(lanes, step, self._limits, self._policies.speculation, self.learner)

    def _asks_later(self) -> bool:
        """Return whether a waiting lane may ask for blocks during the next steps."""
        has_slot = len(self._lanes) - len(self._waiting) < self._limits.requests_max
        waiting = self._waiting
        return bool(waiting) and any(lane.state == "waiting" and (has_slot or lane.output_tokens) for lane in waiting)

    def _ask_for_first_blocks(self) -> None:
        """Ask for the first blocks of requests that can be in the next steps, oldest first.

        Asking late gives more prefix hits, since other requests seal blocks meanwhile. So a request waits while another
        one in this batcher computes most of its prompt. A preempted request with output needs no free place, because
        decodes take turns.
        """
        asking = [lane for lane in self._waiting if lane.state == "asking"]
        room = self._limits.requests_max - len(self._ready) - len(asking)
        waiting = [lane for lane in self._waiting if lane.state == "waiting" and (room > 0 or lane.output_tokens)]
        if not waiting:
            return
        tokens = sum(lane.remaining_tokens for lane in (*asking, *self._ready) if lane.remaining_tokens > 1)
        here = {held for lane in self._ready if lane.hashes for held in lane.cached_hashes(0, lane.sealed_blocks)}
        coming = (*self._ready, *asking)
        soon = {held for lane in coming if lane.hashes for held in lane.cached_hashes(lane.sealed_blocks)} - here
        for lane in waiting:
            is_first = bool(coming) and all(lane.key < other.key for other in coming)
            if room <= 0 and not lane.output_tokens:
                continue
            if tokens >= 2 * self._limits.step_tokens_max and not is_first:
                return
            if lane.is_worth_waiting(soon):
                continue
            lane.state = "asking"
            self._ask(lane, len(lane.tokens), lane.prefix())
            soon |= set(lane.cached_hashes(lane.sealed_blocks)) - here
            room -= 1
            tokens += lane.remaining_tokens

    def _ask(self, lane: Lane, length_tokens: int, prefix: tuple[BlockHash, ...] = ()) -> None:
        lane.expect(lane.blocks_for(length_tokens + self._growth_tokens))
        self._add_event(BlocksWanted(lane.request.id, lane.attempt, self.worker, lane.asked_blocks, prefix))

    def _slice(self, lane: Lane, count: int) -> Slice:
        self._report.start(lane)
        self._turns += 1
        lane.last_turn = self._turns
        return Slice(
            request_id=lane.request.id,
            tokens=lane.tokens,
            start=lane.computed_tokens,
            count=count,
            block_table=lane.table,
            sample=count == lane.remaining_tokens and lane.until != "prompt",
            sampling=lane.request.sampling,
            prompt_tokens=lane.request.prompt_tokens,
            spilled_tokens=lane.spilled_tokens,
            stream=lane.stream,
        )

    # ---- results in, reports out

    def commit(self, step: Step, result: StepResult) -> None:
        """Record the result of a step: computed tokens, sealed blocks, sampled tokens and finished requests."""
        self._has_skipped = self._skips
        for part, outcome in zip(step.slices, result.slices, strict=True):
            if outcome.failure:
                self.fail(part, outcome.failure)
            else:
                self._record_slice(self._lanes[part.request_id], part, outcome)

    def commit_run(self, run: DecodeRun, steps: int, ended: Mapping[RequestId, int]) -> None:
        """Record steps of a run. `ended`: requests that end with the last step, and their last tokens.

        The report has no tokens: the simulator, which skips these steps, knows them (`Lane.repeated_token`).
        """
        for lane in run.lanes:
            self._turns += 1
            lane.last_turn = self._turns
            lane.decode_on(steps, ended.get(lane.request.id))
            first, hashes = lane.seal() if run.seals_blocks else (0, ())
            if hashes:
                self._report.events.append(BlocksSealed(lane.request.id, lane.attempt, self.worker, first, hashes))
            if lane.request.id in ended or len(lane.tokens) >= lane.tokens_max:
                self._end(lane)

    def fail(self, part: Slice, reason: str) -> None:
        """Fail the request of a slice that the engine cannot compute."""
        lane = self._lanes[part.request_id]
        self._forget(lane)
        self._add_event(RequestFailed(part.request_id, lane.attempt, self.worker, reason))

    def _record_slice(self, lane: Lane, part: Slice, outcome: SliceResult) -> None:
        """Record a slice: its computed tokens, the sampled token, and one more token per accepted draft."""
        is_late = part.sample and outcome.token is None
        count = part.count - part.drafts - is_late  # the masks were late: compute the last token again
        self._report.is_load_new |= count > 1
        lane.computed_tokens += count
        lane.prompt_logprobs += outcome.prompt_logprobs
        self._record_token(lane, outcome)
        if lane.drafter is None or not part.drafts or is_late:
            return
        self._report.drafted_tokens += part.drafts
        lane.drafter.note(part.drafts, len(outcome.further))
        # A draft is never a stop token or beyond the limit, so only the last token can end the request.
        for token, logprob in outcome.further:
            self._report.accepted_tokens += 1
            lane.computed_tokens += 1
            self._record_token(lane, SliceResult(token=token, logprob=logprob))

    def _record_token(self, lane: Lane, outcome: SliceResult) -> None:
        if outcome.token is not None:
            lane.tokens.append(outcome.token)
            if lane.output_tokens == 1:
                self._clock.begun.append(lane)
        first, hashes = lane.seal()
        if hashes:
            self._report.events.append(BlocksSealed(lane.request.id, lane.attempt, self.worker, first, hashes))
        if outcome.token is not None:
            self._report.draw(lane, outcome)
            self._end(lane)
        elif lane.is_left:
            self._hand_off(lane)

    def _end(self, lane: Lane) -> None:
        """Report the end of the request, or of its part on this worker, if the newest token was the last."""
        reason = lane.finish_reason()
        if reason is not None:
            self._forget(lane)
            self._add_event(RequestFinished(lane.request.id, lane.attempt, self.worker, reason, lane.output_tokens))
        elif lane.until == "first_token":
            self._hand_off(lane)

    def _hand_off(self, lane: Lane) -> None:
        self._forget(lane)
        self._add_event(PrefillFinished(lane.request.id, lane.attempt, self.worker, lane.computed_tokens))

    def take_report(self, *, now_s: float, step_s: float = 0.0, uncommitted_tokens: int = 0) -> StepReport | None:
        """Return everything to report since the last call; None if there is nothing.

        `uncommitted_tokens`: tokens that the current run has computed and not committed.
        """
        report = self._report
        if not (step_s or report.events or report.tokens):
            report.is_load_new = False  # reported with the next step or request for blocks
            return None
        report.is_load_new = self.learner.take_report_due(is_due=report.is_load_new)
        return report.take(self.view(now_s, uncommitted_tokens), step_s)

    def view(self, now_s: float, uncommitted_tokens: int = 0) -> WorkerView:
        """Return the current load."""
        self._clock.now_s = now_s
        queued_tokens, queued_requests, context_tokens, pairs, pace = load_of(self._lanes.values())
        return WorkerView(
            id=self.worker, host=self.host, role=self.role,
            running_requests=len(self._ready), waiting_requests=len(self._waiting),
            queued_tokens=queued_tokens, queued_requests=queued_requests, queued_pairs=pairs,
            context_tokens=context_tokens + uncommitted_tokens, observed_at_s=now_s,
            newest_request=self._newest, prices=self.learner.prices, pace=pace,
        )  # fmt: skip
