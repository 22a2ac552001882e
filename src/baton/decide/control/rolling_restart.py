"""A rolling restart: workers end and start again one after the other, while the others serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.leaving import RestartWorker
from baton.core.types import WorkerId
from baton.decide.control.fleet import Fleet


@dataclass(slots=True)
class RollingRestart:
    """Drains the next worker once the one before has joined again. `Moves` restarts a drained worker."""

    fleet: Fleet
    _left: list[WorkerId] = field(default_factory=list[WorkerId])

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers that are to restart, or have not joined again yet."""
        return (*self.fleet.restarting, *self._left)

    def is_ending(self, worker: WorkerId) -> bool:
        """Return whether this worker was told to end, and has not joined again."""
        return worker in self.fleet.restarting and worker not in self.fleet.draining

    def want(self, workers: Sequence[WorkerId]) -> None:
        """Restart these workers. This replaces an earlier list, except for the worker that drains already."""
        for worker in [worker for worker in self.fleet.restarting if self.is_ending(worker)]:
            del self.fleet.restarting[worker]  # it may never come back
        self._left = [worker for worker in dict.fromkeys(workers) if worker not in self.fleet.restarting]

    def advance(self) -> list[RestartWorker]:
        """Drain the next worker, unless a restart is under way. Return the command for a worker that is alone.

        If no other worker can take its requests, it restarts at once: its requests wait for it and continue there.
        """
        while self._left and not self.fleet.restarting:
            worker = self._left.pop(0)
            if worker not in self.fleet:
                continue  # it was lost, and so restarts anyway, or it drains already
            self.fleet.restarting[worker] = self.fleet.view(worker).host
            if len(self.fleet.views()) == 1:
                self.fleet.leave(worker)
                return [RestartWorker(worker)]
            self.fleet.drain(worker)
        return []
