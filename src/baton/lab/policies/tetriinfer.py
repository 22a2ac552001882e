"""TetriInfer: two-level scheduling, placement by predicted output length, and role flips of idle workers.

Source: Inference without Interference (arXiv 2401.11181), sections 3.2 to 3.5. Its chunked prefill is part of the
batching policies here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, LoadWindow, Request, Role, WorkerId, WorkerView
from baton.decide.policy.predictions import kv_free_tokens
from baton.lab.policies.draws import draw


@dataclass(slots=True, kw_only=True)
class TetriInferPlacement:
    """Draw two workers with room for the predicted output, and use the one with fewer heavy decodes.

    A decode is heavy if its predicted length exceeds `heavy_tokens`. Room is reserved for the upper end of the range
    that the predicted length falls in.
    """

    range_tokens: int = 200
    """Width of the ranges of predicted lengths."""
    heavy_tokens: int = 128
    """A longer predicted output counts as heavy."""
    _placed: dict[WorkerId, deque[bool]] = field(default_factory=dict[WorkerId, deque[bool]])
    """For each worker, whether each of its latest requests is heavy, oldest first."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        ranges = int(cluster.expected_output_tokens // self.range_tokens) + 1
        reach_tokens = request.prompt_tokens + ranges * self.range_tokens
        roomy = [worker for worker in candidates if kv_free_tokens(worker) >= reach_tokens] or list(candidates)
        chosen = min(_two(request, roomy), key=self._interference)
        placed = self._placed.setdefault(chosen.id, deque())
        placed.append(cluster.expected_output_tokens > self.heavy_tokens)
        if len(self._placed) > 2 * len(cluster.workers):
            known = {worker.id for worker in cluster.workers}
            self._placed = {worker: kept for worker, kept in self._placed.items() if worker in known}
        return chosen.id

    def _interference(self, worker: WorkerView) -> tuple[int, int, WorkerId]:
        placed = self._placed.get(worker.id, deque())
        while len(placed) > worker.running_requests:
            placed.popleft()
        return (sum(placed), worker.running_requests, worker.id)


def _two(request: Request, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Draw two different workers, or the only one."""
    first = draw(f"first {request.id}", 0, len(workers))
    if len(workers) == 1:
        return [workers[0]]
    second = (first + 1 + draw(f"second {request.id}", 0, len(workers) - 1)) % len(workers)
    return [workers[first], workers[second]]


@dataclass(slots=True, kw_only=True)
class TetriInferRoles:
    """Flip a worker that has been idle for `idle_s`, if the other role has work. One worker of each role remains."""

    idle_s: float = 60.0
    """Idle time before a worker flips."""
    _idle_since_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        idle = [worker for worker in cluster.workers if not worker.running_requests and not worker.queued_tokens]
        since = {worker.id: self._idle_since_s.get(worker.id, now_s) for worker in idle}
        self._idle_since_s = since
        left = {role: sum(worker.role == role for worker in cluster.workers) for role in ("prefill", "decode")}
        flips: dict[WorkerId, Role] = {}
        for worker in idle:
            other = other_role(worker.role)
            if other is None or now_s - since[worker.id] < self.idle_s or left[worker.role] == 1:
                continue
            if not any(busy.role == other and busy.running_requests for busy in cluster.workers):
                continue
            flips[worker.id] = other
            left[worker.role] -= 1
            del self._idle_since_s[worker.id]
        return flips


def other_role(role: Role) -> Role | None:
    """Return the role that this role flips to; None for mixed."""
    match role:
        case "prefill":
            return "decode"
        case "decode":
            return "prefill"
        case "mixed":
            return None
