"""Moves: hand running decodes off to other workers. Their KV moves too; their text does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import ClusterView, FlightView, RequestId, WorkerId


@runtime_checkable
class MovesPolicy(Protocol):
    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        """Return the requests to move, each with its new worker. Called at every tick.

        `flights` holds requests that decode, on workers of any role. Requests that are moving already are left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoMoves:
    """Never move a running request."""

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        return {}
