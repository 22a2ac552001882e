"""What /metrics says of tiers: each host's own, and what hosts share once."""

from __future__ import annotations

from baton.core.config import PolicyConfig
from baton.core.types import HostId
from baton.decide.control.build import build_coordinator, build_policies
from baton.decide.control.cluster import Cluster
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.control.decision_log import LogHeader
from baton.decide.control.host_pools import PoolRules
from baton.decide.cost.linear import LinearCost
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.serve.live.tiers import kv_blocks

OWN = TierRules(name="file", blocks_max=7)
SHARED = TierRules(name="pool", blocks_max=50, shared_as="pool://somewhere")


def test_every_hosts_own_tier_is_counted_and_a_shared_one_once() -> None:
    """Before, only the last host's were shown, and the shared one at whichever that was."""
    header = LogHeader(policy=PolicyConfig(), block_tokens=4)
    coordinator = build_coordinator(header, build_policies(header.policy, LinearCost()))
    cluster = Cluster(coordinator, PoolRules(eviction=LeastRecentlyUsed))
    layout = KVLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
    for name in ("a", "b"):
        cluster.handle(HostAdded(HostId(name), 3, layout, (OWN, SHARED)), 0.0)
    counted = [(tier, view.id, view.blocks_total) for tier, view in kv_blocks(cluster.pools.values())]
    assert counted == [("host", "a", 3), ("host", "b", 3), ("file", "a", 7), ("pool", "a", 50), ("file", "b", 7)]
