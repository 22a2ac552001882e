"""Deduplicate equal idle workers, so that a decision in a large fleet evaluates few candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_not

from baton.core.report_parts import StepPrices
from baton.core.types import HostId, Role, WorkerId, WorkerView

Facts = tuple[HostId, str, Role, int, int, int, StepPrices | None]
"""The properties of an idle worker: host, kind, role, limits and learned prices."""


@dataclass(slots=True)
class DistinctWorkers:
    """Keeps one of several idle workers that differ only by their id: the one with the lowest id.

    Between two decisions only one or two workers change. All other views are the same objects (`control/fleet.py` keeps
    them) and are not examined again. Memory: the views of the last call.
    """

    _workers: Sequence[WorkerView] = ()
    _busy: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    _idle: dict[Facts, dict[WorkerId, WorkerView]] = field(default_factory=dict[Facts, dict[WorkerId, WorkerView]])

    def among(self, workers: Sequence[WorkerView], apart: Mapping[WorkerId, object]) -> list[WorkerView]:
        """Return the distinct workers, in no particular order.

        `apart`: workers with state outside their view. They are never merged with others.
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
    """Return the properties of an idle worker. None: the worker is busy."""
    if worker.running_requests or worker.queued_requests or worker.queued_tokens or worker.context_tokens:
        return None
    return (
        worker.host, worker.kind, worker.role, worker.step_tokens_max, worker.requests_max, worker.kv_tokens_max,
        worker.prices,
    )  # fmt: skip
