"""Scaling: choose the number of workers of each role. A worker takes time to start, so policies may look ahead."""

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
        """Return the target number of workers per role; roles that are left out stay unchanged. Called at every tick.

        `cluster` has the live workers, and in `cluster.starting` those that were requested and have not joined yet.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedFleet:
    """Never start or retire a worker."""

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        return {}
