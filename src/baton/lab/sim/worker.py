"""A simulated worker process: the real batcher, an engine, and steps that take virtual time.

If the engine can predict when requests end, a run of decode steps with the same requests is played in closed form: one
event at the end of the run instead of one a step. The results are the same (tests/simulation/test_closed_form.py). A
command that arrives during a run ends it after the current step. Callers call `catch_up` before they read the state of
a worker.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice

import numpy as np
from msgspec import Struct

from baton.core.copies import LayersDone
from baton.core.messages import BlocksGranted, StepReport, WorkerCommand
from baton.core.ports import CostModel
from baton.core.step import Step
from baton.core.types import RequestId, WorkerId
from baton.decide.control.batcher import Batcher
from baton.decide.control.decode_run import DecodeRun
from baton.decide.kv.spill import SpillRules
from baton.lab.sim.engines import DecodePredictor, SimEngine
from baton.lab.sim.loop import ARRAY_MIN, STEP_ENDS, EventLoop, MessageBatch, MessageLink, arrival_times_s
from baton.lab.sim.noise import StepDraws

NO_ENDS: Mapping[RequestId, int] = {}
Part = tuple[RequestId, int, "array[int]"]
"""A decoding request, its attempt, and an array of the one token that it decodes in every step but its last."""
RUN_STEPS_MAX = 1024
"""Maximum steps of a run. A command may end a run early, and then the precomputed rest is wasted."""


def _ignore(_why: str) -> None:
    """Ignore the end of the process."""


class DecodedSteps(Struct, frozen=True, gc=False):
    """Tokens of consecutive decode steps of the same requests, one token a request and step."""

    worker: WorkerId
    parts: Sequence[Part]
    times_s: array[float]
    """Time at which the server receives each step."""
    report: StepReport | None
    """Report of the last step, if it has anything besides tokens."""


@dataclass(slots=True)
class _Running:
    """The state of a run: decode steps of the same requests, played in closed form."""

    run: DecodeRun
    parts: Sequence[Part]
    ends_s: array[float]
    """End of each step. The last step may end requests."""
    ended: Mapping[RequestId, int]
    """Requests that the last step ends, each with its final token."""
    begun: list[MessageBatch]
    """Messages to the server, for steps that are not recorded yet."""
    begun_steps: int = 0
    """Steps whose messages are in `begun` or delivered."""
    done: int = 0
    """Recorded steps: the batcher has their tokens."""
    is_cut: bool = False
    """The run was shortened, for example because a command waits."""


@dataclass(slots=True)
class SharedCores:
    """The cores that a host's workers share: `steps_at_once` steps run at full speed, more run slower."""

    steps_at_once: int
    running: set[WorkerId] = field(default_factory=set[WorkerId])

    def begin(self, worker: WorkerId) -> float:
        """Record that a worker begins a step. Return its duration as a multiple of that on an idle host."""
        self.running.add(worker)
        return max(1.0, len(self.running) / self.steps_at_once)


@dataclass(slots=True, kw_only=True)
class SimWorker:
    """The loop of a worker. It applies commands between steps, never during one. An idle worker waits for a command."""

    batcher: Batcher
    engine: SimEngine
    cost: CostModel
    loop: EventLoop
    outbound: MessageLink[StepReport | LayersDone | DecodedSteps]
    ended_by: tuple[type[Exception], ...] = ()
    """Exceptions that end the process: all, if a policy is a user's plug-in. Any other is a bug that ends the run."""
    broke: Callable[[str], None] = _ignore
    """Called with the reason when an exception ends the process."""
    slowdown: float = 1.0
    """Steps take this many times as long as the cost model says. Set by `slow_down`."""
    cores: SharedCores | None = None
    """None: the worker has its own cores."""
    draws: StepDraws | None = None
    """None: every step takes the predicted time."""
    hung: bool = False
    """The process is alive but does nothing. A hung worker does not recover: the server kills it."""
    dead: bool = False
    spill: SpillRules | None = None
    """Spill space of the host: steps wait for their reads from it. None: there is none."""
    is_stepwise: bool = False
    """No step is skipped, because the server reads the tokens of every worker with each event."""
    executing: Step | None = None
    """The current step, unless it belongs to a run in closed form."""
    steps: int = 0
    """Steps begun so far."""
    inbox_max: int = 0
    """Highest number of commands that waited for a step to end."""
    _inbox: list[WorkerCommand] = field(default_factory=list[WorkerCommand])
    _running: _Running | None = None
    _predictor: DecodePredictor | None = field(init=False)

    def __post_init__(self) -> None:
        self._predictor = None if self.is_stepwise else self.engine.predictor

    @property
    def id(self) -> WorkerId:
        return self.batcher.worker

    @property
    def _is_as_priced(self) -> bool:
        """Every step so far took as long as the cost model predicts, so a run may skip steps.

        Otherwise each step is played, because each measured time changes the predicted prices.
        """
        is_exact = self.slowdown == 1.0 and self.cores is None and self.draws is None
        return is_exact and self.batcher.learner.prices is None

    def receive(self, command: WorkerCommand) -> None:
        """Receive a command from the server. An idle worker applies it at once."""
        self._inbox.append(command)
        if len(self._inbox) > self.inbox_max:
            self.inbox_max = len(self._inbox)
        if self._running is not None:
            self._apply_during_run(self._running, command)
        elif self.executing is None and not self.hung:
            self._turn()

    def kill(self) -> None:
        """End like a process that gets SIGKILL. The KV of the current step becomes garbage."""
        self.catch_up()
        if self.executing is not None:
            self.engine.corrupt_kv(self.executing)
        self.dead, self.executing, self._running = True, None, None

    def hang(self) -> None:
        """Stop working, for good."""
        self.catch_up()
        self.hung, self._running = True, None

    def slow_down(self, factor: float) -> None:
        """Make steps that begin from now on take `factor` times as long as the cost model says."""
        if self._running is not None:
            self._cut(self._running)
        self.slowdown = factor

    def catch_up(self) -> None:
        """Record the steps of a run that have ended by now, so that the state is as if each had been played."""
        running = self._running
        if running is not None:
            self._cut(running)
            try:
                self._record_steps(running, bisect_right(running.ends_s, self.loop.now_s) - running.done)
            except self.ended_by as error:
                self._break(error)

    def _break(self, error: Exception) -> None:
        """End like a process with an uncaught exception."""
        self.dead, self.executing, self._running = True, None, None
        self.broke(f"{self.id} ended: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        try:
            self._plan()
        except self.ended_by as error:
            self._break(error)

    def _plan(self) -> None:
        if self._inbox:
            self.batcher.apply(self._inbox)
            self._inbox = []
            for order in self.batcher.spills:
                self.engine.spill(order)
            self.batcher.spills.clear()
        elif self.batcher.is_idle:
            return
        predictor = self._predictor if self._is_as_priced else None
        now_s = self.loop.now_s
        planned = self.batcher.plan(now_s) if predictor is None else self.batcher.plan_run(now_s)
        self._send(step_s=0.0)  # requests for blocks travel while the step runs
        if isinstance(planned, DecodeRun):
            assert predictor is not None
            self._begin_run(planned, predictor)
        elif planned.slices:
            self.executing = planned
            self.steps += 1
            step_s = self.cost.step_s(planned.shape)
            if self.spill is not None:
                step_s = self.spill.step_s(planned.shape, step_s)
            step_s *= self.slowdown
            if self.draws is not None:
                step_s = self.draws.taken_s(step_s, self.loop.now_s)
            if self.cores is not None:
                step_s *= self.cores.begin(self.id)
            self.loop.at(
                self.loop.now_s + step_s,
                partial(self._finish, planned, step_s, was_as_priced=self._is_as_priced),
                STEP_ENDS,
            )
            if planned.streamed:
                self._stream(planned, step_s)

    def _stream(self, step: Step, step_s: float) -> None:
        """Report layers as they complete in a step whose KV is streamed. All layers take equally long."""
        self.outbound.send(LayersDone(self.id, step.streamed, 0))
        layers = self.engine.layers
        for end in step.layer_ends(layers):
            self.loop.at(self.loop.now_s + step_s * end / layers, partial(self._finish_layers, step, end), STEP_ENDS)

    def _finish_layers(self, step: Step, end: int) -> None:
        if self.executing is step and not self.hung:
            self.engine.compute_layers(step, end)
            self.outbound.send(LayersDone(self.id, step.streamed, end))

    def _finish(self, step: Step, step_s: float, *, was_as_priced: bool) -> None:
        if self.cores is not None:
            self.cores.running.discard(self.id)
        if self.dead or self.hung:
            return
        result = self.engine.execute(step)
        try:
            self.batcher.commit(step, result)
        except self.ended_by as error:
            self._break(error)
            return
        self.executing = None
        if not was_as_priced:
            self.batcher.learner.observe(step.shape, step_s)
        self._send(step_s=step_s)
        self._turn()

    def _send(self, *, step_s: float) -> None:
        report = self.batcher.take_report(now_s=self.loop.now_s, step_s=step_s)
        if report is not None:
            self.outbound.send(report)

    # ---- decode steps in closed form

    def _begin_run(self, run: DecodeRun, predictor: DecodePredictor) -> None:
        run.steps = min(run.steps, RUN_STEPS_MAX)
        steps, ended = predictor.ends(run)
        ends_s = self._ends_s(run, steps)
        parts: list[Part] = []
        for lane in run.lanes:
            if lane.repeated_token is None:
                lane.repeated_token = predictor.token(lane.request)
            parts.append((lane.request.id, lane.attempt, lane.repeated_token))
        self._running = _Running(run, parts, ends_s, ended, [])
        self._wake_for(self._running)

    def _ends_s(self, run: DecodeRun, steps: int) -> array[float]:
        """Return the end of each of the first `steps` steps of a run that begins now."""
        steps_s = self.cost.decode_run_s(requests=len(run.lanes), context_tokens=run.context_tokens, steps=steps)
        if steps >= ARRAY_MIN:
            times = np.array(steps_s, np.float64)
            times[0] += self.loop.now_s
            return array("d", np.add.accumulate(times, out=times).tobytes())
        return array("d", islice(accumulate(steps_s, initial=self.loop.now_s), 1, None))

    def _wake_for(self, running: _Running) -> None:
        """Schedule a wake-up at the end of the run, or earlier if a request asks for blocks or runs out of them."""
        run, steps = running.run, len(running.ends_s)
        if not running.is_cut:
            if run.asks_after < steps:
                steps = run.asks_after
            if run.room_steps < steps:
                steps = run.room_steps
        self.loop.at(running.ends_s[steps - 1], partial(self._wake, running, steps), STEP_ENDS)

    def _wake(self, running: _Running, steps: int) -> None:
        """Continue after `steps` steps, unless the run was cut to another length or the worker is dead or hung."""
        if self._running is not running:
            return
        run, last = running.run, len(running.ends_s)
        if running.is_cut or steps == last:
            if steps == last:
                self._finish_run(running)
            return
        if steps == run.room_steps:
            del running.ends_s[steps:]
            running.ended = NO_ENDS
            self._finish_run(running)
            return
        if steps == run.asks_after:
            self._send_messages(running, steps)
            self.batcher.ask_in_run(run)
            report = self.batcher.take_report(now_s=self.loop.now_s, uncommitted_tokens=steps * len(run.lanes))
            if report is not None:
                self.outbound.send(report)
        self._wake_for(running)

    def _apply_during_run(self, running: _Running, command: WorkerCommand) -> None:
        """Apply a command that arrives during a run.

        Granted blocks extend the run, because only its later steps read them. Any other command ends the run after the
        current step.
        """
        alone = len(self._inbox) == 1 and not running.is_cut and not running.done
        if alone and isinstance(command, BlocksGranted) and self.batcher.widen(running.run, command):
            self._inbox.clear()
        else:
            self._cut(running)

    def _cut(self, running: _Running) -> None:
        """End a run after the current step, because a command may change the later ones."""
        steps = bisect_right(running.ends_s, self.loop.now_s) + 1
        if steps < len(running.ends_s):
            del running.ends_s[steps:]
            running.ended, running.is_cut = NO_ENDS, True
            self._wake_for(running)

    def _finish_run(self, running: _Running) -> None:
        try:
            self._record_steps(running, len(running.ends_s) - running.done)
        except self.ended_by as error:
            self._break(error)
            return
        self._running = None
        self._turn()

    def _record_steps(self, running: _Running, steps: int) -> None:
        """Record ended steps in the batcher, and report them to the server.

        A report is delivered at its arrival time, or at once if that time has passed. If steps name sealed blocks, each
        report needs the batcher's state after its last step, so the steps are recorded report by report. Otherwise all
        steps are recorded at once, because only the last one reports more than tokens.
        """
        if steps <= 0:
            return
        begin, end, seals_blocks = running.done, running.done + steps, running.run.seals_blocks
        self._send_messages(running, end)
        ends_s = running.ends_s[begin:end]
        arrivals_s = arrival_times_s(ends_s, running.begun)
        running.begun.clear()
        last = end == len(running.ends_s)
        arrived, reported = min(bisect_left(arrivals_s, self.loop.now_s), steps - last), 0
        if not seals_blocks:
            self._advance(running, steps, running.ended if last else NO_ENDS)
        for piece in ([arrived] if arrived else []) + [1] * (steps - arrived):
            first, reported = reported, reported + piece
            ended = running.ended if last and reported == steps else NO_ENDS
            if seals_blocks:
                self._advance(running, piece, ended)
            report = self.batcher.take_report(now_s=ends_s[reported - 1]) if seals_blocks or reported == steps else None
            decoded = DecodedSteps(self.id, _with_ends(running.parts, ended), arrivals_s[first:reported], report)
            if reported <= arrived:
                self.outbound.deliver(decoded)
            else:
                self.outbound.post(decoded, arrivals_s[first])

    def _send_messages(self, running: _Running, steps: int) -> None:
        """Send the messages of the first `steps` steps of a run, unless they are sent."""
        if running.begun_steps < steps:
            running.begun.append(self.outbound.begin(running.ends_s, running.begun_steps, steps))
            running.begun_steps = steps

    def _advance(self, running: _Running, steps: int, ended: Mapping[RequestId, int]) -> None:
        self.batcher.commit_run(running.run, steps, ended)
        self.steps += steps
        running.done += steps


def _with_ends(parts: Sequence[Part], ended: Mapping[RequestId, int]) -> Sequence[Part]:
    """Return the parts with the final token of every request that ends."""
    if not ended:
        return parts
    return [
        (request_id, attempt, array("I", (ended[request_id],)) if request_id in ended else token)
        for request_id, attempt, token in parts
    ]
