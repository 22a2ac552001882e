"""The worker's step loop. One thread, one direction: take commands, plan, execute, report."""

from __future__ import annotations

from dataclasses import dataclass

from baton.control.batcher import Batcher
from baton.engine.port import StepEngine
from baton.worker.clock import now_s
from baton.worker.link import ServerLink


@dataclass(slots=True)
class StepLoop:
    link: ServerLink
    batcher: Batcher
    engine: StepEngine

    def run(self) -> None:
        """Step until the server hangs up or says so.

        Commands are taken between steps, never inside one. An idle worker blocks in `take`; it does not poll.
        Questions to the host pool leave before the step, so that the answers come while it runs.
        """
        idle = True
        while not (self.link.closed or self.batcher.closed):
            self.batcher.apply(self.link.take(wait=idle))
            step = self.batcher.plan()
            self._report(0.0)
            idle = not step.slices
            if idle:
                continue
            started_s = now_s()
            result = self.engine.execute(step)  # the only slow line
            self.batcher.commit(step, result)
            self._report(now_s() - started_s)

    def _report(self, step_s: float) -> None:
        report = self.batcher.take_report(now_s=now_s(), step_s=step_s)
        if report is not None:
            self.link.put(report)
