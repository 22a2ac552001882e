"""A simulated worker process: the real batcher, an engine, and steps that take virtual time.

Steps in which the same requests decode are played in closed form where the engine can foresee their end: one event
where the run ends, instead of one for each step. What comes of it is what stepping gives (tests/simulation/
test_closed_form.py): a command that arrives in a run ends it after the step under way, and whoever looks at what a
worker has done so far calls `catch_up` first.
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
from baton.lab.sim.engines import Foresight, SimEngine
from baton.lab.sim.loop import ARRAY_MIN, STEP_ENDS, EventLoop, MessageBatch, MessageLink, arrival_times_s

NO_ENDS: Mapping[RequestId, int] = {}
Part = tuple[RequestId, int, "array[int]"]
"""A request that decodes, its attempt, and the token that it decodes in every step, as an array of one."""
RUN_STEPS_MAX = 1024
"""A run that may be cut at any time is not computed further ahead."""


def _nobody(_why: str) -> None:
    """Hear nothing."""


class DecodedSteps(Struct, frozen=True, gc=False):
    """Tokens that requests decoded together, one each a step, as the server hears of them."""

    worker: WorkerId
    parts: Sequence[Part]
    times_s: array[float]
    """When the server heard of each step."""
    report: StepReport | None
    """What else there is to say with the last of them."""


@dataclass(slots=True)
class _Running:
    """A run under way."""

    run: DecodeRun
    parts: Sequence[Part]
    ends_s: array[float]
    """Of its steps. The last may end requests."""
    ended: Mapping[RequestId, int]
    """Requests that the last step ends, each with its final token."""
    begun: list[MessageBatch]
    """News of steps that are on their way to the server and not booked."""
    begun_steps: int = 0
    """Steps whose news have begun their way."""
    done: int = 0
    """Steps that are booked."""
    is_cut: bool = False
    """It ends earlier than it could: a command waits."""


@dataclass(slots=True, kw_only=True)
class SimWorker:
    """The loop of a worker. Commands are taken between steps, never inside one; an idle worker waits."""

    batcher: Batcher
    engine: SimEngine
    cost: CostModel
    loop: EventLoop
    outbound: MessageLink[StepReport | LayersDone | DecodedSteps]
    ended_by: tuple[type[Exception], ...] = ()
    """What ends the process when it is raised in it: anything, where a policy of the user's own plays. What is raised
    among our own is a bug, and ends the simulation."""
    broke: Callable[[str], None] = _nobody
    """Told why the process has ended by itself."""
    slowdown: float = 1.0
    """Steps take this many times as long as the cost model says. Set by `slow_down`."""
    hung: bool = False
    """It lives, holds its memory, and does nothing. A hung worker does not come back: it is killed."""
    dead: bool = False
    executing: Step | None = None
    """The step under way, where it is played on its own."""
    steps: int = 0
    """Steps begun so far."""
    inbox_max: int = 0
    """Most commands that ever waited for a step to end."""
    _inbox: list[WorkerCommand] = field(default_factory=list[WorkerCommand])
    _running: _Running | None = None
    _foresight: Foresight | None = field(init=False)

    def __post_init__(self) -> None:
        self._foresight = self.engine.foresight

    @property
    def id(self) -> WorkerId:
        return self.batcher.worker

    def receive(self, command: WorkerCommand) -> None:
        """Take a command from the server; act on it at once where no step is under way."""
        self._inbox.append(command)
        if len(self._inbox) > self.inbox_max:
            self.inbox_max = len(self._inbox)
        if self._running is not None:
            self._obey_in_run(self._running, command)
        elif self.executing is None and not self.hung:
            self._turn()

    def kill(self) -> None:
        """End as a process ends under SIGKILL: in the middle of whatever it was writing."""
        self.catch_up()
        if self.executing is not None:
            self.engine.scribble(self.executing)
        self.dead, self.executing, self._running = True, None, None

    def hang(self) -> None:
        """Do nothing from now on, and never come back."""
        self.catch_up()
        self.hung, self._running = True, None

    def slow_down(self, factor: float) -> None:
        """Let steps that begin from now on take `factor` times as long as the cost model says."""
        if self._running is not None:
            self._cut(self._running)
        self.slowdown = factor

    def catch_up(self) -> None:
        """Book the steps of a run that have ended by now: its tokens are then where stepping would have them."""
        running = self._running
        if running is not None:
            self._cut(running)
            try:
                self._book(running, bisect_right(running.ends_s, self.loop.now_s) - running.done)
            except self.ended_by as error:
                self._break(error)

    def _break(self, error: Exception) -> None:
        """End as a process ends that raises."""
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
        elif self.batcher.is_idle:
            return
        foresight = self._foresight
        planned = self.batcher.plan() if foresight is None else self.batcher.plan_run()
        self._send(step_s=0.0)  # questions for blocks travel while the step runs
        if isinstance(planned, DecodeRun):
            assert foresight is not None
            self._begin_run(planned, foresight)
        elif planned.slices:
            self.executing = planned
            self.steps += 1
            step_s = self.cost.step_s(planned.shape) * self.slowdown
            self.loop.at(self.loop.now_s + step_s, partial(self._finish, planned, step_s), STEP_ENDS)
            if planned.streamed:
                self._stream(planned, step_s)

    def _stream(self, step: Step, step_s: float) -> None:
        """Tell of a step that ends a prompt how many layers are done: each takes as long as the others."""
        self.outbound.send(LayersDone(self.id, step.streamed, 0))
        layers = self.engine.layers
        for end in step.layer_ends(layers):
            self.loop.at(self.loop.now_s + step_s * end / layers, partial(self._finish_layers, step, end), STEP_ENDS)

    def _finish_layers(self, step: Step, end: int) -> None:
        if self.executing is step and not self.hung:
            self.engine.compute_layers(step, end)
            self.outbound.send(LayersDone(self.id, step.streamed, end))

    def _finish(self, step: Step, step_s: float) -> None:
        if self.dead or self.hung:
            return
        result = self.engine.execute(step)
        try:
            self.batcher.commit(step, result)
        except self.ended_by as error:
            self._break(error)
            return
        self.executing = None
        self._send(step_s=step_s)
        self._turn()

    def _send(self, *, step_s: float) -> None:
        report = self.batcher.take_report(now_s=self.loop.now_s, step_s=step_s)
        if report is not None:
            self.outbound.send(report)

    # ---- decode steps in closed form

    def _begin_run(self, run: DecodeRun, foresight: Foresight) -> None:
        run.steps = min(run.steps, RUN_STEPS_MAX)
        steps, ended = foresight.ends(run)
        ends_s = self._ends_s(run, steps)
        parts: list[Part] = []
        for lane in run.lanes:
            if lane.said is None:
                lane.said = foresight.token(lane.request)
            parts.append((lane.request.id, lane.attempt, lane.said))
        self._running = _Running(run, parts, ends_s, ended, [])
        self._wake_for(self._running)

    def _ends_s(self, run: DecodeRun, steps: int) -> array[float]:
        """When each of the first so many steps of a run ends that begins now."""
        steps_s = self.cost.decode_run_s(requests=len(run.lanes), context_tokens=run.context_tokens, steps=steps)
        if steps >= ARRAY_MIN:
            times = np.array(steps_s, np.float64)
            if self.slowdown != 1.0:
                times *= self.slowdown
            times[0] = steps_s[0] * self.slowdown + self.loop.now_s
            return array("d", np.add.accumulate(times, out=times).tobytes())
        if self.slowdown != 1.0:
            steps_s = [step_s * self.slowdown for step_s in steps_s]
        return array("d", islice(accumulate(steps_s, initial=self.loop.now_s), 1, None))

    def _wake_for(self, running: _Running) -> None:
        """Schedule a wake-up for when a request of the run asks for blocks or has none left, or for the run's end."""
        run, steps = running.run, len(running.ends_s)
        if not running.is_cut:
            if run.asks_after < steps:
                steps = run.asks_after
            if run.room_steps < steps:
                steps = run.room_steps
        self.loop.at(running.ends_s[steps - 1], partial(self._wake, running, steps), STEP_ENDS)

    def _wake(self, running: _Running, steps: int) -> None:
        """Go on after so many steps, unless the run was cut to another length, or its worker is dead or hangs."""
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
            self._begin_news(running, steps)
            self.batcher.ask_in_run(run)
            report = self.batcher.take_report(now_s=self.loop.now_s, unbooked_tokens=steps * len(run.lanes))
            if report is not None:
                self.outbound.send(report)
        self._wake_for(running)

    def _obey_in_run(self, running: _Running, command: WorkerCommand) -> None:
        """Let a command end the run after the step under way; room for one who decodes in it lets it go on longer.

        Room may be given in the middle of a step: nothing looks at it before the next one.
        """
        alone = len(self._inbox) == 1 and not running.is_cut and not running.done
        if alone and isinstance(command, BlocksGranted) and self.batcher.widen(running.run, command):
            self._inbox.clear()
        else:
            self._cut(running)

    def _cut(self, running: _Running) -> None:
        """End a run with the step under way: what comes after it, the command that has arrived may change."""
        steps = bisect_right(running.ends_s, self.loop.now_s) + 1
        if steps < len(running.ends_s):
            del running.ends_s[steps:]
            running.ended, running.is_cut = NO_ENDS, True
            self._wake_for(running)

    def _finish_run(self, running: _Running) -> None:
        try:
            self._book(running, len(running.ends_s) - running.done)
        except self.ended_by as error:
            self._break(error)
            return
        self._running = None
        self._turn()

    def _book(self, running: _Running, steps: int) -> None:
        """Book steps that have ended, and tell the server: at once what it has heard by now, the rest on its way.

        Where blocks get names, each of these pieces is booked when it is told. Where none does, all are booked
        together: there is nothing to say but tokens before the last step.
        """
        if steps <= 0:
            return
        begin, end, names_blocks = running.done, running.done + steps, running.run.names_blocks
        self._begin_news(running, end)
        ends_s = running.ends_s[begin:end]
        heard_s = arrival_times_s(ends_s, running.begun)
        running.begun.clear()
        last = end == len(running.ends_s)
        heard, told = min(bisect_left(heard_s, self.loop.now_s), steps - last), 0
        if not names_blocks:
            self._advance(running, steps, running.ended if last else NO_ENDS)
        for piece in ([heard] if heard else []) + [1] * (steps - heard):
            first, told = told, told + piece
            ended = running.ended if last and told == steps else NO_ENDS
            if names_blocks:
                self._advance(running, piece, ended)
            report = self.batcher.take_report(now_s=ends_s[told - 1]) if names_blocks or told == steps else None
            decoded = DecodedSteps(self.id, _with_ends(running.parts, ended), heard_s[first:told], report)
            if told <= heard:
                self.outbound.deliver(decoded)
            else:
                self.outbound.post(decoded, heard_s[first])

    def _begin_news(self, running: _Running, steps: int) -> None:
        """Let the news of the first steps of a run begin their way."""
        if running.begun_steps < steps:
            running.begun.append(self.outbound.begin(running.ends_s, running.begun_steps, steps))
            running.begun_steps = steps

    def _advance(self, running: _Running, steps: int, ended: Mapping[RequestId, int]) -> None:
        self.batcher.commit_run(running.run, steps, ended)
        self.steps += steps
        running.done += steps


def _with_ends(parts: Sequence[Part], ended: Mapping[RequestId, int]) -> Sequence[Part]:
    """Put what ends a request in the place of the token that it decoded before."""
    if not ended:
        return parts
    return [
        (request_id, attempt, array("I", (ended[request_id],)) if request_id in ended else token)
        for request_id, attempt, token in parts
    ]
