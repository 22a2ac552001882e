"""The policies of a simulation by name: ours, and simple ones to compare with."""

from __future__ import annotations

from collections.abc import Callable

from baton.control.coordinator import Policies
from baton.core.errors import ConfigError
from baton.core.names import did_you_mean
from baton.policy.admission import BoundedQueue
from baton.policy.baselines import LeastLoad, RoundRobin
from baton.policy.batching import MixedChunked
from baton.policy.eviction import LeastRecentlyUsed
from baton.policy.fairness import FirstComeFirstServed
from baton.policy.placement import FastestStep, PlacementPolicy
from baton.policy.routing import EarliestFirstToken, RoutingPolicy
from baton.sim.cluster import SimPolicies
from baton.sim.spec import ClusterSpec

Choice = tuple[Callable[[], RoutingPolicy], Callable[[], PlacementPolicy]]
CHOICES: dict[str, Choice] = {
    "baton": (EarliestFirstToken, FastestStep),
    "round-robin": (RoundRobin, RoundRobin),
    "least-load": (LeastLoad, LeastLoad),
}
"""Who routes and who places, by the name that `baton sim --policy` takes."""


def build_policies(name: str, spec: ClusterSpec) -> SimPolicies:
    """Make the policies of a name, fresh. Raises ConfigError for an unknown one: it lists the known."""
    choice = CHOICES.get(name)
    if choice is None:
        raise ConfigError(f"unknown policy {name!r}{did_you_mean(name, CHOICES)}; known are {', '.join(CHOICES)}")
    routing, placement = choice
    cluster = Policies(
        admission=BoundedQueue(requests_max=spec.queue_requests_max),
        routing=routing(),
        placement=placement(),
        fairness=FirstComeFirstServed(),
        cost=spec.cost_model(),
    )
    return SimPolicies(cluster=cluster, batching=MixedChunked(), eviction=LeastRecentlyUsed)
