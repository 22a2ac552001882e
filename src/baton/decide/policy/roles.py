"""Roles: change workers between prefill and decode as the load shifts. A flip is free: the host owns the KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import ClusterView, LoadWindow, Role, WorkerId


@runtime_checkable
class RolesPolicy(Protocol):
    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        """Return the workers that change their role, each with its new role. Called at every tick.

        `history` is bounded, never empty, and ends with the window that has just closed.
        """
        ...


@dataclass(frozen=True, slots=True)
class StaticRoles:
    """Keep the role that each worker was started with, or that an operator has set."""

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        return {}
