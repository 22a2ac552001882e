"""Predict how full the arenas are, and when running answers will have freed room in them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from operator import attrgetter

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, HostId, Request, WorkerId, WorkerView
from baton.decide.cost.online import cost_of
from baton.decide.policy.predictions import answer_step_s, decoding_requests
from baton.decide.policy.prefix import longest_hit

_CONTEXT, _ARENA = attrgetter("context_tokens"), attrgetter("host", "kv_tokens_max")
TIME_S_MIN = 1e-9
"""Lower bound of predicted times, since they are divisors."""


@dataclass(slots=True)
class AnswerLengths:
    """The mean predicted length of the answers that decode on each worker."""

    default_tokens: float
    """Expected answer length until some requests have finished."""
    _by_worker: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])

    def expected(self, cluster: ClusterView) -> float:
        """Return the expected length in tokens of the answer to this request."""
        return max(2.0, cluster.expected_output_tokens or self.default_tokens)

    def on(self, worker: WorkerView, cluster: ClusterView) -> float:
        """Return the mean length in tokens of the answers that decode on this worker.

        The delay that a prompt causes is spread over these tokens. If no answer decodes: the expected length of this
        request.
        """
        expected_tokens = self.expected(cluster)
        return self._by_worker.get(worker.id, expected_tokens) if decoding_requests(worker) else expected_tokens

    def note(self, worker: WorkerView, cluster: ClusterView) -> None:
        """Record that an answer will decode on this worker."""
        before = decoding_requests(worker)
        known = self.on(worker, cluster) * before
        self._by_worker[worker.id] = (known + self.expected(cluster)) / (before + 1)
        if len(self._by_worker) > 2 * len(cluster.workers):
            present = {worker.id for worker in cluster.workers}
            self._by_worker = {worker: tokens for worker, tokens in self._by_worker.items() if worker in present}


class ArenaRoom(Struct, frozen=True, gc=False):
    """The arena of one host, estimated from the views of its workers."""

    room_s: float
    """Time until there is room for the request."""
    fill_ratio: float
    kinds: Set[str] = frozenset()
    """Kinds of its workers, if this host has the longest prefix hit and so would send it."""


def arena_rooms(
    request: Request, cluster: ClusterView, cost: CostModel, answers: AnswerLengths
) -> dict[HostId, ArenaRoom]:
    """Estimate how full each arena is, and when finished requests will have freed room for this request."""
    arena_tokens = dict(map(_ARENA, reversed(cluster.workers)))  # as reported by the first worker of each host
    used = dict.fromkeys(arena_tokens, 0)
    if len(used) == 1:
        used = dict.fromkeys(used, sum(map(_CONTEXT, cluster.workers)))
    else:
        for worker in filter(_CONTEXT, cluster.workers):
            used[worker.host] += worker.context_tokens
    reach_tokens = request.prompt_tokens + answers.expected(cluster) / 2
    best = longest_hit(cluster)
    kinds = {best: cluster.kinds_on(best)} if best is not None else {}
    rooms: dict[HostId, ArenaRoom] = {}
    for host, tokens_max in arena_tokens.items():
        if not tokens_max:
            rooms[host] = ArenaRoom(0.0, 0.0, kinds.get(host, frozenset()))
            continue
        missing_tokens = used[host] + reach_tokens - tokens_max
        room_s = missing_tokens / _freed_tokens(host, cluster, cost, answers) if missing_tokens > 0 else 0.0
        rooms[host] = ArenaRoom(room_s, min(1.0, used[host] / tokens_max), kinds.get(host, frozenset()))
    return rooms


def _freed_tokens(host: HostId, cluster: ClusterView, cost: CostModel, answers: AnswerLengths) -> float:
    """Predict how many KV tokens are freed on a host per second, at least one."""
    freed_tokens = 0.0
    for worker in cluster.workers:
        if worker.host == host and worker.context_tokens:
            life_s = answers.on(worker, cluster) * answer_step_s(worker, 0, 0, cost_of(worker, cost))
            decoding_ratio = decoding_requests(worker) / max(1, worker.running_requests)
            freed_tokens += worker.context_tokens * decoding_ratio / max(TIME_S_MIN, life_s)
    return max(1.0, freed_tokens)
