"""A simulated worker process: the real batcher, an engine, and steps that take virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from baton.control.batcher import Batcher
from baton.core.messages import StepReport, WorkerCommand
from baton.core.ports import CostModel
from baton.core.step import Step
from baton.core.types import WorkerId
from baton.sim.engines import SimEngine
from baton.sim.loop import EventLoop


@dataclass(slots=True, kw_only=True)
class SimWorker:
    """The loop of a worker. Commands are taken between steps, never inside one; an idle worker waits."""

    batcher: Batcher
    engine: SimEngine
    cost: CostModel
    loop: EventLoop
    report: Callable[[StepReport], None]
    slowdown: float = 1.0
    """Steps take this many times as long as the cost model says."""
    hung: bool = False
    """It lives, holds its memory, and does nothing. A hung worker does not come back: it is killed."""
    dead: bool = False
    executing: Step | None = None
    steps: int = 0
    """Steps begun so far."""
    inbox_max: int = 0
    """Most commands that ever waited for a step to end."""
    _inbox: list[WorkerCommand] = field(default_factory=list[WorkerCommand])

    @property
    def id(self) -> WorkerId:
        return self.batcher.worker

    def receive(self, command: WorkerCommand) -> None:
        """Take a command from the server; act on it at once where no step is under way."""
        self._inbox.append(command)
        self.inbox_max = max(self.inbox_max, len(self._inbox))
        if self.executing is None and not self.hung:
            self._turn()

    def kill(self) -> None:
        """End as a process ends under SIGKILL: in the middle of whatever it was writing."""
        if self.executing is not None:
            self.engine.scribble(self.executing)
        self.dead, self.executing = True, None

    def _turn(self) -> None:
        self.batcher.apply(self._inbox)
        self._inbox = []
        step = self.batcher.plan()
        self._send(step_s=0.0)  # questions for blocks travel while the step runs
        if not step.slices:
            return
        self.executing = step
        self.steps += 1
        step_s = self._step_s(step)
        self.loop.after(step_s, partial(self._finish, step, step_s))

    def _finish(self, step: Step, step_s: float) -> None:
        if self.dead or self.hung:
            return
        result = self.engine.execute(step)
        self.batcher.commit(step, result)
        self.executing = None
        self._send(step_s=step_s)
        self._turn()

    def _send(self, *, step_s: float) -> None:
        report = self.batcher.take_report(now_s=self.loop.now_s, step_s=step_s)
        if report is not None:
            self.report(report)

    def _step_s(self, step: Step) -> float:
        return self.cost.step_s(step.shape) * self.slowdown
