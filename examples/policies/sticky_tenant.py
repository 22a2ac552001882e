"""A routing policy of one's own: a tenant's prompts stay on one worker, unless that worker is far behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, WorkerId, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyTenant:
    """Send a tenant home; send it to the shortest queue when home is more than `behind_tokens` behind that."""

    behind_tokens: int = 2048

    def route(
        self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel
    ) -> WorkerId:
        """See `RoutingPolicy.route`."""
        number = int.from_bytes(blake2b(request.tenant.encode(), digest_size=8).digest(), "big")
        home = candidates[number % len(candidates)]
        shortest = min(candidates, key=lambda worker: (worker.queued_tokens, worker.id))
        return shortest.id if home.queued_tokens - shortest.queued_tokens > self.behind_tokens else home.id
