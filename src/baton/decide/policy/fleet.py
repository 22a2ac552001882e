"""Policies of the fleet, asked at every tick: the roles of workers, their number, and moves of running decodes.

A role flip is free, because the host owns the KV. A worker takes time to start, so scaling may look ahead. A move
transfers the KV of a request, and does not change its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, FlightView, LoadWindow, RequestId, Role, WorkerId


class RoleChange(Struct, frozen=True, kw_only=True):
    """The new role of a worker, and why it changes, for the decision log and the dashboard."""

    role: Role
    reason: str = ""


@runtime_checkable
class RolesPolicy(Protocol):
    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role | RoleChange]:
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
