"""The workers of a cluster as the coordinator knows them: role, host and load.

A worker's report is out of date when it arrives, but the coordinator knows at once which requests it has assigned. So
it counts queues and requests itself, and takes only the other values from reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from baton.core.report_parts import OtherLoad
from baton.core.types import HostId, RequestId, Role, WorkerId, WorkerView, prefill_pairs


@dataclass(slots=True)
class _Load:
    reported: WorkerView
    """The worker's last report, or its view at joining."""
    requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens of requests whose prefill is not reported as done: an upper bound of the queue."""
    queued_requests: int = 0
    """Number of requests with such tokens. On a mixed worker it includes requests that decode there."""
    unreported: dict[RequestId, tuple[int, float]] = field(default_factory=dict[RequestId, tuple[int, float]])
    """Prompt tokens, and their pairs, of each request that was assigned after the last report, in that order."""
    context_tokens: int = 0

    def known(self, newest: RequestId | None) -> None:
        """Remove the requests up to `newest`, the last one that the report counts, from `unreported`."""
        if newest not in self.unreported:
            return
        for request_id in list(self.unreported):
            del self.unreported[request_id]
            if request_id == newest:
                return


@dataclass(slots=True)
class Fleet:
    """Live workers, in the order in which they joined.

    Views are cached between decisions: an event changes the view of one worker, a decision reads all views.
    """

    _views: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """Views as of joining, with the current role."""
    _loads: dict[WorkerId, _Load] = field(default_factory=dict[WorkerId, _Load])
    _current: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """Views with the current load, except for the workers in `_changed`."""
    _changed: dict[WorkerId, None] = field(default_factory=dict[WorkerId, None])
    _all: tuple[WorkerView, ...] = ()
    """The values of `_current` at the last call of `views`."""
    _able: dict[Role, list[WorkerId]] = field(default_factory=dict[Role, list[WorkerId]])
    """Workers that can serve each role. Cleared when a worker joins, leaves or changes role."""
    hosts: set[HostId] = field(default_factory=set[HostId])
    """Hosts of the live workers."""
    draining: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """Workers that get no further requests. No policy sees them; they are retired once they are idle."""
    restarting: dict[WorkerId, HostId] = field(default_factory=dict[WorkerId, HostId])
    """The worker that a rolling restart drains or has ended, until it joins again, with its host."""
    step_began_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    """See `ClusterView.step_began_s`."""
    leaving: set[HostId] = field(default_factory=set[HostId])
    """Hosts that want to leave. All of their workers drain."""

    def __contains__(self, worker: object) -> bool:
        return worker in self._views

    def join(self, view: WorkerView) -> None:
        """Add a worker, or let a draining one serve again. A worker of a leaving host drains at once."""
        self.draining.pop(view.id, None)
        self.restarting.pop(view.id, None)
        self._loads.setdefault(view.id, _Load(view)).reported = view
        self._views[view.id] = self._current[view.id] = view
        self._changed[view.id] = None
        self._able.clear()
        self.hosts.add(view.host)
        if view.host in self.leaving:
            self.drain(view.id)

    def leave(self, worker: WorkerId) -> None:
        self._loads.pop(worker, None)
        self.step_began_s.pop(worker, None)
        self._hide(worker)
        self.draining.pop(worker, None)

    def drain(self, worker: WorkerId) -> None:
        """Give the worker no further requests. Its present ones stay until they end or move."""
        view = self._views[worker]
        self._hide(worker)
        self.draining[worker] = view

    def _hide(self, worker: WorkerId) -> None:
        """Remove the worker from the views of policies."""
        self._views.pop(worker, None)
        self._current.pop(worker, None)
        self._changed.pop(worker, None)
        self._able.clear()
        self.hosts = {view.host for view in self._views.values()}
        self._all = tuple(self._current.values())

    def report(self, view: WorkerView, now_s: float) -> None:
        """Record a worker's report. Only its load is used: role and other properties stay as known here.

        The time is the coordinator's, because the clock of another host may differ.
        """
        load = self._loads.get(view.id)
        if load is not None:
            load.reported = view
            self.step_began_s[view.id] = now_s
            load.known(view.newest_request)
            self._change(view.id)

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change a worker's role at once. It need not drain, because the KV belongs to the host."""
        known = self._views.get(worker)
        if known is not None:
            self._views[worker] = msgspec.structs.replace(known, role=role)
            self._changed[worker] = None
            self._able.clear()

    def load(
        self, worker: WorkerId, request_id: RequestId, now_s: float, *, queued_tokens: int, context_tokens: int
    ) -> None:
        """Record that a request was assigned to the worker."""
        load = self._loads[worker]
        if not load.reported.queued_tokens and not any(tokens for tokens, _ in load.unreported.values()):
            self.step_began_s[worker] = now_s
        load.requests += 1
        load.queued_tokens += queued_tokens
        load.queued_requests += queued_tokens > 0
        load.unreported[request_id] = (queued_tokens, prefill_pairs(queued_tokens, context_tokens - queued_tokens))
        load.context_tokens += context_tokens
        self._change(worker)

    def unload(self, worker: WorkerId, request_id: RequestId, *, queued_tokens: int, context_tokens: int) -> None:
        """Record that the worker no longer has a request. Does nothing for a worker that has left."""
        load = self._loads.get(worker)
        if load is None:
            return
        load.requests -= 1
        load.unreported.pop(request_id, None)
        load.queued_tokens -= queued_tokens
        load.queued_requests -= queued_tokens > 0
        load.context_tokens -= context_tokens
        self._change(worker)

    def _change(self, worker: WorkerId) -> None:
        if worker in self._views:
            self._changed[worker] = None

    def view(self, worker: WorkerId) -> WorkerView:
        return self._views[worker]

    def views(self, hosts: Collection[HostId] = ()) -> tuple[WorkerView, ...]:
        """Return every live worker with its current load. `hosts`: only those on these hosts. Empty: all."""
        if self._changed:
            for worker in self._changed:
                self._current[worker] = _with_load(self._views[worker], self._loads[worker])
            self._changed.clear()
            self._all = tuple(self._current.values())
        return tuple(_on(hosts, self._all)) if hosts else self._all

    def having(self, role: Role, hosts: Collection[HostId] = ()) -> list[WorkerView]:
        """Return the workers that can serve this role, as `ClusterView.having`, without a scan of all workers.

        `hosts`: as of `views`.
        """
        able = self._able.get(role)
        if able is None:
            roles = (role, "mixed")
            able = self._able[role] = [worker for worker, view in self._views.items() if view.role in roles]
        self.views()
        return list(_on(hosts, map(self._current.__getitem__, able)))


def processes_of(fleet: Fleet) -> list[WorkerView]:
    """Return all workers, including draining ones. Use it for their hosts; their loads may be out of date."""
    return [*fleet.views(), *fleet.draining.values()]


def _with_load(view: WorkerView, load: _Load) -> WorkerView:
    reported = load.reported
    queued_tokens, queued_requests, pairs = reported.queued_tokens, reported.queued_requests, reported.queued_pairs
    if queued_tokens and not queued_requests:
        queued_requests = load.queued_requests  # the worker reports tokens only
    if pairs or not queued_tokens:
        pairs += sum(more_pairs for _, more_pairs in load.unreported.values())
    for tokens, _ in load.unreported.values():
        queued_tokens += tokens
        queued_requests += tokens > 0
    current = WorkerView(
        id=view.id,
        host=view.host,
        role=view.role,
        running_requests=load.requests,
        waiting_requests=reported.waiting_requests,
        queued_tokens=queued_tokens if queued_tokens < load.queued_tokens else load.queued_tokens,
        queued_requests=queued_requests if queued_requests < load.queued_requests else load.queued_requests,
        queued_pairs=pairs * min(1.0, max(0, load.queued_tokens) / queued_tokens) if queued_tokens else 0.0,
        context_tokens=max(load.context_tokens, reported.context_tokens),
        observed_at_s=reported.observed_at_s,
        kind=view.kind,
        kv_tokens_max=view.kv_tokens_max,
        step_tokens_max=view.step_tokens_max,
        requests_max=view.requests_max,
        prices=reported.prices,
        pace=reported.pace,
    )
    return current if reported.others is None else _with_others(current, reported.others)


def _with_others(view: WorkerView, others: OtherLoad) -> WorkerView:
    return msgspec.structs.replace(
        view,
        running_requests=view.running_requests + others.requests,
        queued_tokens=view.queued_tokens + others.queued_tokens,
        queued_requests=view.queued_requests + others.queued_requests,
    )


def _on(hosts: Collection[HostId], views: Iterable[WorkerView]) -> Iterable[WorkerView]:
    """Return the workers on these hosts; all of them if `hosts` is empty."""
    return (view for view in views if view.host in hosts) if hosts else views
