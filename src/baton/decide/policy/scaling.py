"""Scaling: how many workers of each role there should be. Starting one takes time, so it looks ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import ClusterView, LoadWindow, Role


@runtime_checkable
class ScalingPolicy(Protocol):
    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        """Return how many workers each role should have. A role that is not named stays as it is. Asked at every tick.

        `cluster` counts live workers and, in `cluster.starting`, those that were asked for and have not joined.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedFleet:
    """Never start or retire a worker."""

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        """See `ScalingPolicy.target`."""
        return {}
