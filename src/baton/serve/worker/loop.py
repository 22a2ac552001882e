"""The worker's step loop. One thread, one direction: take commands, plan, execute, report."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

from baton.compute.step_engine import StepEngine
from baton.core.step import Step
from baton.decide.control.batcher import Batcher
from baton.move.clock import now_s
from baton.serve.worker.layers import LayerWatch
from baton.serve.worker.link import ServerLink
from baton.serve.worker.step_log import StepLogWriter

log = logging.getLogger("baton.worker")


@dataclass(slots=True)
class StepLoop:
    link: ServerLink
    batcher: Batcher
    engine: StepEngine
    steps: StepLogWriter | None = None
    """Where steps are written down, if anywhere."""
    watch: LayerWatch | None = None
    """Tells of steps that end a prompt how far they are. None: no other host waits for that."""

    def run(self) -> None:
        """Step until the server hangs up or says so.

        Commands are taken between steps, never inside one. An idle worker blocks in `take`; it does not poll.
        Questions to the host pool leave before the step, so that the answers come while it runs.
        """
        idle = True
        while not (self.link.closed or self.batcher.closed):
            commands = self.link.take(wait=idle)
            turned_s = now_s()
            self.batcher.apply(commands)
            step = self.batcher.plan()
            self._report(0.0)
            idle = not step.slices
            if idle:
                continue
            started_s = now_s()
            self._execute(step)
            engine_s = now_s() - started_s
            self._report(engine_s)
            if self.steps is not None:
                self.steps.note(step.shape, at_s=turned_s, engine_s=engine_s, turn_s=now_s() - turned_s)

    def _execute(self, step: Step) -> None:
        try:
            with self.watch.over(step) if self.watch is not None and step.streamed else nullcontext():
                result = self.engine.execute(step)  # the only slow line
        except Exception:
            log.exception("a step of %d requests failed; trying them one by one", len(step.slices))
            self._execute_one_by_one(step)
            return
        self.batcher.commit(step, result)

    def _execute_one_by_one(self, step: Step) -> None:
        """Find the request that the engine cannot compute and give up that one: the others must not die with it.

        Raises the last error where several requests fail: then it is this worker that is broken, and others may do.
        """
        failed = 0
        for part in step.slices:
            alone = Step((part,))
            try:
                result = self.engine.execute(alone)
            except Exception as error:
                failed += 1
                if failed > 1:
                    raise
                self.batcher.fail(part, f"the engine failed on this request: {type(error).__name__}: {error}")
                continue
            self.batcher.commit(alone, result)

    def _report(self, step_s: float) -> None:
        report = self.batcher.take_report(now_s=now_s(), step_s=step_s)
        if report is not None:
            self.link.put(report)
