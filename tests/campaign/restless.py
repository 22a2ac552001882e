"""Policies that fetch, place, move and scale pseudo-randomly, so that the seed campaign covers every transition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from msgspec import structs

from baton.core.config import Plugin
from baton.core.ports import CostModel
from baton.core.types import (
    ROLES,
    ClusterView,
    FlightView,
    HostId,
    LoadWindow,
    Request,
    RequestId,
    Role,
    WorkerId,
    WorkerView,
)
from baton.decide.policy.handoff import FirstTokenWorker, HandoffPath, HandoffView
from baton.decide.policy.policy_sets import policy_set
from baton.decide.policy.routing import Route
from baton.lab.sim.cluster import SimPolicies
from baton.lab.sim.policies import configured_policies
from baton.lab.sim.spec import ClusterSpec
from tests.campaign.scenario import RESTLESS, RESTLESS_FLEET

UNPINNED = ", unpinned"
"""After the name of a set: prefill workers compute later turns of a conversation, too."""


@dataclass(frozen=True, slots=True)
class RestlessRouting:
    """Routes to any worker of any role, and fetches the prefix from the host with the longest hit."""

    def route(self, request: Request, candidates: Sequence[WorkerView], cluster: ClusterView, cost: CostModel) -> Route:
        hits = cluster.prefix_hit_tokens
        fetch = max(sorted(hits), key=lambda host: hits[host], default=None)
        return Route(worker=_pick(request.id, "route", cluster.workers), fetch=fetch)


@dataclass(frozen=True, slots=True)
class RestlessPlacement:
    """Places a request on any worker."""

    def place(
        self,
        request: Request,
        source: HostId | None,
        candidates: Sequence[WorkerView],
        cluster: ClusterView,
        cost: CostModel,
    ) -> WorkerId:
        return _pick(request.id, "place", cluster.workers)


@dataclass(frozen=True, slots=True)
class RestlessMoves:
    """Moves a third of the decoding requests at every tick."""

    def moves(
        self, cluster: ClusterView, flights: Sequence[FlightView], cost: CostModel, now_s: float
    ) -> Mapping[RequestId, WorkerId]:
        salt = f"{now_s:.6f}"
        return {
            flight.request.id: _pick(flight.request.id, salt, cluster.workers)
            for flight in flights
            if crc32(f"{flight.request.id} {salt}".encode()) % 3 == 0
        }


@dataclass(frozen=True, slots=True)
class RestlessStreaming:
    """Sends every sealed block ahead at once."""

    def run_tokens(self, request: Request, cost: CostModel) -> int:
        return 1

    def layer_groups(self, request: Request, chunk_tokens: int, cost: CostModel) -> int:
        """Return 1 to 5 groups, depending on the request."""
        return 1 + crc32(request.id.encode()) % 5


@dataclass(frozen=True, slots=True)
class RestlessHandoff:
    """Hands two of three requests off through the remote pool."""

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        return "central" if crc32(f"{handoff.request.id} {handoff.tokens}".encode()) % 3 else "direct"


@dataclass(frozen=True, slots=True)
class RestlessFirstToken:
    """Leaves every other first token to the decode worker."""

    def first_token_by(self, request: Request, cost: CostModel) -> FirstTokenWorker:
        return "decode" if crc32(f"teller {request.id}".encode()) % 2 else "prefill"


@dataclass(frozen=True, slots=True)
class RestlessRoles:
    """Assigns a new role to a third of the workers at every tick."""

    def assign(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[WorkerId, Role]:
        draws = {worker.id: crc32(f"role {worker.id} {now_s:.6f}".encode()) for worker in cluster.workers}
        return {worker: ROLES[draw // 3 % len(ROLES)] for worker, draw in draws.items() if draw % 3 == 0}


@dataclass(frozen=True, slots=True)
class RestlessScaling:
    """Asks for another number of workers of each role at every tick, even 0. It stops, so that runs end."""

    content_after_s: float = 3.0
    workers_max: int = 2

    def target(
        self, cluster: ClusterView, history: Sequence[LoadWindow], cost: CostModel, now_s: float
    ) -> Mapping[Role, int]:
        if now_s > self.content_after_s:
            return {}
        return {role: crc32(f"{role} {now_s:.6f}".encode()) % (self.workers_max + 1) for role in ROLES}


def _pick(request_id: RequestId, salt: str, workers: Sequence[WorkerView]) -> WorkerId:
    return workers[crc32(f"{salt} {request_id}".encode()) % len(workers)].id


def play_policies(spec: ClusterSpec, name: str) -> SimPolicies:
    """Return the policies of a scenario: the restless ones, or a named set, where `UNPINNED` may follow the name."""
    if name.endswith(UNPINNED):
        use = Plugin(use="slo-headroom", options={"pins_turns": False})
        named = policy_set(name.removesuffix(UNPINNED))
        return configured_policies(structs.replace(named, admission=use, routing=use, placement=use), spec)
    if name not in (RESTLESS, RESTLESS_FLEET):
        return configured_policies(policy_set(name), spec)
    ours = configured_policies(policy_set("baton"), spec)
    cluster = replace(
        ours.cluster,
        routing=RestlessRouting(),
        placement=RestlessPlacement(),
        moves=RestlessMoves(),
        streaming=RestlessStreaming(),
        handoff=RestlessHandoff(),
        first_token=RestlessFirstToken(),
    )
    if name == RESTLESS_FLEET:
        cluster = replace(cluster, roles=RestlessRoles(), scaling=RestlessScaling())
    return replace(ours, cluster=cluster)
