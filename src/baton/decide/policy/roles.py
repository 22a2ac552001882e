"""Roles: which worker prefills and which decodes, as the load shifts. A flip costs nothing: the KV is the host's."""

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
        """Return the workers whose role shall change, each with its new one. Asked at every tick.

        `history` ends with the window that has just closed, and is bounded; it is never empty.
        """
        ...


@dataclass(frozen=True, slots=True)
class StaticRoles:
    """Every worker keeps the role that it was started with, or that an operator gave it."""

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        """See `RolesPolicy.assign`."""
        return {}
