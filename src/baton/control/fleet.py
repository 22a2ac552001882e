"""The workers of a cluster as the coordinator knows them: role, host, and the load it has given them itself.

A report is old when it arrives; what the coordinator has handed out is known at once. So the queue and the number of
requests are counted here, and only what a worker alone can know is taken from its reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.core.types import Role, WorkerId, WorkerView


@dataclass(slots=True)
class _Load:
    requests: int = 0
    queued_tokens: int = 0
    """Of requests whose prefill is not known to be over: what is really queued is this, or less."""
    queued_requests: int = 0
    unreported_tokens: int = 0
    """Given since the worker's last report, which therefore cannot know of them."""
    context_tokens: int = 0


@dataclass(slots=True)
class Fleet:
    """Live workers, in the order in which they joined."""

    _views: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    _loads: dict[WorkerId, _Load] = field(default_factory=dict[WorkerId, _Load])

    def join(self, view: WorkerView) -> None:
        self._views[view.id] = view
        self._loads.setdefault(view.id, _Load())

    def leave(self, worker: WorkerId) -> None:
        self._views.pop(worker, None)
        self._loads.pop(worker, None)

    def report(self, view: WorkerView) -> None:
        """Take a worker's own report. Its role stays what it was set to here, and what it is, what it joined as."""
        known = self._views.get(view.id)
        if known is not None:
            self._views[view.id] = msgspec.structs.replace(
                view, role=known.role, kind=known.kind, kv_tokens_max=known.kv_tokens_max
            )
            self._loads[view.id].unreported_tokens = 0

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """Flip a worker at once: it has nothing to drain, since the KV belongs to the host."""
        known = self._views.get(worker)
        if known is not None:
            self._views[worker] = msgspec.structs.replace(known, role=role)

    def load(self, worker: WorkerId, *, queued_tokens: int, context_tokens: int) -> None:
        """Note that a request was given to the worker."""
        load = self._loads[worker]
        load.requests += 1
        load.queued_tokens += queued_tokens
        load.queued_requests += queued_tokens > 0
        load.unreported_tokens += queued_tokens
        load.context_tokens += context_tokens

    def unload(self, worker: WorkerId, *, queued_tokens: int, context_tokens: int) -> None:
        """Note that the worker is done with a request. Nothing happens for a worker that has left."""
        load = self._loads.get(worker)
        if load is None:
            return
        load.requests -= 1
        load.queued_tokens -= queued_tokens
        load.queued_requests -= queued_tokens > 0
        load.context_tokens -= context_tokens

    def view(self, worker: WorkerId) -> WorkerView:
        return self._views[worker]

    def views(self) -> tuple[WorkerView, ...]:
        """Describe every live worker with the load of this moment."""
        return tuple(self._current(view) for view in self._views.values())

    def _current(self, view: WorkerView) -> WorkerView:
        load = self._loads[view.id]
        return WorkerView(
            id=view.id,
            host=view.host,
            role=view.role,
            running_requests=load.requests,
            waiting_requests=view.waiting_requests,
            queued_tokens=min(load.queued_tokens, view.queued_tokens + load.unreported_tokens),
            queued_requests=load.queued_requests,
            context_tokens=max(load.context_tokens, view.context_tokens),
            observed_at_s=view.observed_at_s,
            kind=view.kind,
            kv_tokens_max=view.kv_tokens_max,
        )
