"""Report the finished layers of a running step, so that their KV can be sent to another host before the step ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from baton.compute.step_engine import Progress
from baton.core.copies import LayersDone
from baton.core.step import Step
from baton.core.types import WorkerId

_LOOK_S = 0.0005
"""Polling interval during a watched step, shorter than a layer takes. Other steps are not polled."""


class LayerWatch:
    """A thread that polls the engine's progress during steps whose KV is streamed, and sleeps otherwise."""

    def __init__(
        self, worker: WorkerId, progress: Progress, layers: int, *, tell: Callable[[LayersDone], None]
    ) -> None:
        """`layers`: number of layers of the model. `tell` is called from the polling thread too."""
        self._worker = worker
        self._progress = progress
        self._layers = layers
        self._tell = tell
        self._changed = threading.Condition()
        self._step: Step | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def reporting(self, step: Step) -> Generator[None]:
        """Watch a step while the body of the with statement computes it."""
        self._progress.layers = 0  # before the thread polls: it still has the count of the previous step
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
            assert step is not None, "the wait above ends with a step"
            for end in step.layer_ends(self._layers):
                if not self._wait_for(step, end):
                    break
                self._tell(LayersDone(self._worker, step.streamed, end))
            with self._changed:
                self._changed.wait_for(lambda done=step: self._step is not done)

    def _wait_for(self, step: Step, layers: int) -> bool:
        """Wait until `layers` layers of a step are done. Return False if the whole step ends first."""
        with self._changed:
            while self._step is step and self._progress.layers < layers:
                self._changed.wait(_LOOK_S)
            return self._step is step
