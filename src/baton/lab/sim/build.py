"""Build a simulated cluster from its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.tier_messages import FromTier
from baton.core.types import HostId
from baton.lab.sim.cluster import SimCluster, SimPolicies, fresh_cluster
from baton.lab.sim.engines import SimEngine
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import EventLoop
from baton.lab.sim.server import SimServer
from baton.lab.sim.spec import ClusterSpec
from baton.lab.sim.stores import Stores
from baton.lab.sim.wires import Wires


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """The parts of a simulated cluster, except the event loop."""

    spec: ClusterSpec
    policies: SimPolicies
    new_engine: Callable[[HostId], SimEngine]
    seed: int
    journal: Journal
    closed: Callable[[Life], None]
    """Called once with each closed request."""


def build_cluster(
    spec: ClusterSpec,
    policies: SimPolicies,
    new_engine: Callable[[HostId], SimEngine],
    *,
    seed: int,
    journal: Journal,
    closed: Callable[[Life], None],
) -> SimCluster:
    """Return a cluster whose hosts and workers have joined at time 0."""
    parts = ClusterParts(spec=spec, policies=policies, new_engine=new_engine, seed=seed, journal=journal, closed=closed)
    return build_on(EventLoop(), parts)


def build_on(loop: EventLoop, parts: ClusterParts) -> SimCluster:
    """Return a cluster as `build_cluster` does, on an event loop that clusters may share."""
    spec, journal = parts.spec, parts.journal
    server = SimServer(
        loop=loop,
        cluster=fresh_cluster(spec, parts.policies, journal.steps),
        journal=journal,
        wait_s=spec.wait_s,
        closed=parts.closed,
        reshape_fleet=lambda command: cluster.reshape(command),
        begin_copy=lambda copy: wires.begin(copy),
        use_tier=lambda command: stores.perform(command),
    )
    wires = Wires(
        loop=loop,
        seconds=lambda copy: cluster.copy_s(copy),
        ended=lambda copy, landed: cluster.end_copy(copy, landed),
    )
    stores = Stores(
        loop=loop,
        engine=lambda host: cluster.engines.get(host),
        ended=lambda host, event: server.tell(FromTier(host, event)),
    )
    cluster = SimCluster(
        spec=spec,
        policies=parts.policies,
        new_engine=parts.new_engine,
        server=server,
        loop=loop,
        seed=parts.seed,
        wires=wires,
        stores=stores,
    )
    for host in spec.hosts():
        cluster.open_host(host, spec.kv_of(host))
    for view in spec.views():
        cluster.boot(view)
    cluster.keep_ticking()
    return cluster
