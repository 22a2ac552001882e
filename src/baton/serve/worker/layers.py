"""Tells the server how far a step has got while it runs, where its KV is sent on layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from baton.compute.step_engine import Progress
from baton.core.copies import LayersDone
from baton.core.step import Step
from baton.core.types import WorkerId

_LOOK_S = 0.0005
"""Between two looks at the progress of a step that is watched; a layer takes longer. Nobody looks at others."""


class LayerWatch:
    """A thread that looks at the engine's progress while a step ends a prompt, and otherwise sleeps."""

    def __init__(
        self, worker: WorkerId, progress: Progress, layers: int, *, tell: Callable[[LayersDone], None]
    ) -> None:
        """`layers`: of the engine. `tell` is called by the watching thread too."""
        self._worker = worker
        self._progress = progress
        self._layers = layers
        self._tell = tell
        self._changed = threading.Condition()
        self._step: Step | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, step: Step) -> Generator[None]:
        """Watch a step for the length of a with block, in which it is computed."""
        self._progress.layers = 0  # before anybody looks: it still counts the layers of the step before
        self._tell(LayersDone(self._worker, step.streamed, 0))
        self._watch(step)
        try:
            yield
        finally:
            self._watch(None)

    def _watch(self, step: Step | None) -> None:
        with self._changed:
            self._step = step
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="layers", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._step is not None)
                step = self._step
            assert step is not None, "somebody waited for a step"
            for end in step.layer_ends(self._layers):
                if not self._wait_for(step, end):
                    break
                self._tell(LayersDone(self._worker, step.streamed, end))
            with self._changed:
                self._changed.wait_for(lambda done=step: self._step is not done)

    def _wait_for(self, step: Step, layers: int) -> bool:
        """Wait until so many layers of a step are done. False: it has ended, which is told otherwise."""
        with self._changed:
            while self._step is step and self._progress.layers < layers:
                self._changed.wait(_LOOK_S)
            return self._step is step
