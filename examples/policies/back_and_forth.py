"""A moves policy that shows live moves: at every tick, each request that decodes goes to another host.

[policy.moves]
use = "back_and_forth:BackAndForth"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.ports import CostModel
from baton.core.types import ClusterView, FlightView, RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class BackAndForth:
    """Moves every request that decodes to a worker on another host, at every tick."""

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        """See `MovesPolicy.moves`."""
        decoding = [worker for worker in cluster.workers if worker.role != "prefill"]
        hosts = {worker.id: worker.host for worker in cluster.workers}
        moved: dict[RequestId, WorkerId] = {}
        for flight in flights:
            others = [worker.id for worker in decoding if worker.host != hosts[flight.worker]]
            if others:
                moved[flight.request.id] = others[0]
        return moved
