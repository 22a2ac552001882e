"""The worker's step loop, in one thread: take commands, plan, execute, report."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

from baton.compute.step_engine import StepEngine
from baton.core.errors import DeviceError, StepMemoryError
from baton.core.spill import SpillBlocks
from baton.core.step import Step
from baton.decide.control.batcher import Batcher
from baton.move.arena.spill import SpillMemory
from baton.move.clock import now_s
from baton.serve.worker.layers import LayerWatch
from baton.serve.worker.link import ServerLink
from baton.serve.worker.step_log import StepLogWriter

log = logging.getLogger("baton.worker")


@dataclass(frozen=True, slots=True)
class WorkerSpill:
    """The worker's access to the spill space and to the arena."""

    memory: SpillMemory
    arena: memoryview

    def copy(self, orders: list[SpillBlocks]) -> None:
        """Copy the blocks of all orders to the spill space, and empty the list."""
        for order in orders:
            self.memory.write(self.arena, order.blocks, order.slots)
        orders.clear()


@dataclass(slots=True)
class StepLoop:
    """Runs steps of one engine until the host hangs up or sends Shutdown."""

    link: ServerLink
    batcher: Batcher
    engine: StepEngine
    steps: StepLogWriter | None = None
    """Log of the steps, if configured."""
    watch: LayerWatch | None = None
    """Reports finished layers of streamed steps. None: this engine cannot report them."""
    spill: WorkerSpill | None = None
    """None: the host has no spill space."""

    def run(self) -> None:
        """Run steps. Commands are applied between steps; an idle worker blocks in `take`.

        Requests for KV blocks are sent before the step, so that the host pool answers while the step runs.
        """
        idle = True
        while not (self.link.closed or self.batcher.closed):
            commands = self.link.take(wait=idle)
            turned_s = now_s()
            self.batcher.apply(commands)
            if self.spill is not None:
                self.spill.copy(self.batcher.spills)
            step = self.batcher.plan(turned_s)
            self._report(0.0)
            idle = not step.slices
            if idle:
                continue
            started_s = now_s()
            self._execute(step)
            ended_s, shape = now_s(), step.shape
            engine_s = ended_s - started_s
            self.batcher.learner.observe(shape, ended_s - turned_s)
            self._report(engine_s)
            if self.steps is not None:
                self.steps.note(shape, at_s=turned_s, engine_s=engine_s, turn_s=now_s() - turned_s)

    def _execute(self, step: Step) -> None:
        if self.spill is not None:
            self.spill.memory.read_ahead(step)
        try:
            with self.watch.reporting(step) if self.watch is not None and step.streamed else nullcontext():
                result = self.engine.execute(step)  # the only slow line
        except DeviceError:
            raise  # every later step would fail too: other workers take the requests
        except Exception:
            log.exception("a step of %d requests failed; trying them one by one", len(step.slices))
            self._execute_one_by_one(step)
            return
        self.batcher.commit(step, result)

    def _execute_one_by_one(self, step: Step) -> None:
        """Run each slice of a failed step by itself, and fail only the request that the engine cannot compute.

        If two requests fail, the worker itself is broken: raise the error, so that other workers take the requests.
        Requests that fail because the device's memory is too small for them do not count.
        """
        failed = 0
        for part in step.slices:
            alone = Step((part,))
            try:
                result = self.engine.execute(alone)
            except DeviceError:
                raise
            except StepMemoryError as error:
                self.batcher.fail(part, str(error))
                continue
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
