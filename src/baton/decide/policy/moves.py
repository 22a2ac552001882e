"""Moves: which decoding requests go on elsewhere, while they run. Their KV goes along; their text does not change."""

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
        """Return the requests that shall move, each with the worker that goes on with it. Asked at every tick.

        Only flights that decode can move, whatever the role of their worker; one that is on its way already is not
        among `flights`.
        """
        ...


@dataclass(frozen=True, slots=True)
class NoMoves:
    """Every request ends where it decodes."""

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        """See `MovesPolicy.moves`."""
        return {}
