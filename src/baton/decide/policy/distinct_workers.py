"""Whom a choice is to be made among: of idle workers that are alike, one is enough, and a fleet has many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not

from baton.core.types import HostId, Role, WorkerId, WorkerView

Facts = tuple[HostId, str, Role, int, int, int]
"""What an idle worker is: host, kind, role, and its limits."""


@dataclass(slots=True)
class DistinctWorkers:
    """Leaves out idle workers that differ from another idle one by a higher id alone: they are no better choice.

    From one decision to the next one or two workers have changed. The views of all others are the same objects
    (`control/fleet.py` keeps them), and are not looked at again. Holds what it was asked about last, and no more.
    """

    _workers: Sequence[WorkerView] = ()
    _busy: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    _idle: dict[Facts, dict[WorkerId, WorkerView]] = field(default_factory=dict[Facts, dict[WorkerId, WorkerView]])

    def among(self, workers: Sequence[WorkerView], apart: Mapping[WorkerId, object]) -> list[WorkerView]:
        """Return those that are left of the workers, in no order that means anything.

        `apart`: of whom more is to be said than their views say.
        """
        self._look_at(workers)
        found = list(self._busy.values())
        for idle in self._idle.values():
            own = sorted(idle.keys() & apart.keys()) if apart else ()
            found += [idle[worker] for worker in own]
            alike = idle.keys() - own if own else idle
            if alike:
                found.append(idle[min(alike)])
        return found

    def _look_at(self, workers: Sequence[WorkerView]) -> None:
        before, self._workers = self._workers, workers
        changed = list(compress(zip(before, workers, strict=False), map(is_not, before, workers)))
        if len(before) != len(workers) or any(old.id != new.id for old, new in changed):
            self._busy.clear()
            self._idle.clear()
            for worker in workers:
                self._add(worker)
            return
        for old, new in changed:
            self._remove(old)
            self._add(new)

    def _add(self, worker: WorkerView) -> None:
        facts = _idle_facts(worker)
        if facts is None:
            self._busy[worker.id] = worker
        else:
            self._idle.setdefault(facts, {})[worker.id] = worker

    def _remove(self, worker: WorkerView) -> None:
        facts = _idle_facts(worker)
        if facts is None:
            del self._busy[worker.id]
            return
        alike = self._idle[facts]
        del alike[worker.id]
        if not alike:
            del self._idle[facts]


def _idle_facts(worker: WorkerView) -> Facts | None:
    """Tell what a worker is that has nothing to do. None: it has something to do."""
    if worker.running_requests or worker.queued_requests or worker.queued_tokens or worker.context_tokens:
        return None
    return (
        worker.host, worker.kind, worker.role, worker.step_tokens_max, worker.requests_max, worker.kv_tokens_max,
    )  # fmt: skip
