"""Requests that are bound to a decode worker early: their KV is sent to its host while their prompts are computed.

Under load, seconds pass between the binding and the first decode step. The worker's current load does not include such
requests: without these counts, a placement by load would bind all of them to one idle worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import SendAhead
from baton.core.types import BoundLoad, ClusterView, HostId, Request, RequestId, WorkerId
from baton.decide.control.advice import Policies, PolicyFailure
from baton.decide.control.fleet import Fleet
from baton.decide.control.flight import Flight
from baton.decide.policy.predictions import with_bound


@dataclass(slots=True)
class Bound:
    """The decode workers that requests are bound to. At most one entry per live request."""

    loads: dict[WorkerId, BoundLoad] = field(default_factory=dict[WorkerId, BoundLoad])
    """Load by worker; workers without any are left out. A change replaces the dict, so existing views stay constant."""
    _of: dict[RequestId, tuple[WorkerId, int]] = field(default_factory=dict[RequestId, tuple[WorkerId, int]])
    """The worker and the number of prompt tokens of each bound request."""

    def bind(self, request: Request, worker: WorkerId) -> None:
        """Bind a request to its decode worker, in place of an earlier binding."""
        self.release(request.id)
        self._of[request.id] = worker, request.prompt_tokens
        self._add(worker, 1, request.prompt_tokens)

    def send_ahead(
        self, flight: Flight, source: HostId, cluster: ClusterView, fleet: Fleet, policies: Policies
    ) -> list[SendAhead]:
        """Bind a prompt to a decode worker, and send the computed part there while the rest is computed."""
        request, flight.ahead = flight.request, None
        if not cluster.is_sent_ahead or request.sampling.prompt_logprobs or fleet.hosts == {source}:
            return []
        cluster = with_bound(cluster)
        candidates = cluster.having("decode")
        if all(worker.host == source for worker in candidates):
            return []
        choice = policies.place(request, source, candidates, cluster)
        if isinstance(choice, PolicyFailure):
            return []  # the policy is asked again when the prompt is computed
        if choice != flight.worker:
            self.bind(request, choice)  # the load of the worker that computes the prompt includes the request
        flight.ahead = fleet.view(choice).host
        if flight.ahead == source:
            return []
        return [SendAhead(request, flight.attempt, source, choice, policies.run_tokens(request))]

    def worker_of(self, request_id: RequestId) -> WorkerId | None:
        """Return the worker that a request is bound to. None: there is none."""
        bound = self._of.get(request_id)
        return bound[0] if bound is not None else None

    def release(self, request_id: RequestId) -> None:
        """Remove the binding of a request that decodes now, has ended or starts again. Ignored if there is none."""
        if request_id in self._of:
            worker, tokens = self._of.pop(request_id)
            self._add(worker, -1, -tokens)

    def _add(self, worker: WorkerId, requests: int, tokens: int) -> None:
        before = self.loads.get(worker, BoundLoad(0, 0))
        after = BoundLoad(before.requests + requests, before.tokens + tokens)
        others = {name: load for name, load in self.loads.items() if name != worker}
        self.loads = {**others, worker: after} if after.requests else others
