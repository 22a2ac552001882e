"""The metadata of a store that several hosts share: as long as it is of use, and no longer."""

from __future__ import annotations

from dataclasses import replace

from baton.core.types import BlockHash, HostId
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.control.host_pools import HostPools, PoolRules
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed

A, B = HostId("a"), HostId("b")
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
SHARED = TierRules(name="pool", blocks_max=50, shared_as="pool://somewhere")
BLOCK = BlockHash(b"a block")


def added(hosts: HostPools, host: HostId, rules: TierRules) -> Tier:
    """Add a host with this tier, and return the tier."""
    hosts.add(HostAdded(host, 3, LAYOUT, (rules,)))
    tiers = hosts.pools[host].tiers
    assert tiers is not None
    return tiers.tiers[0]


def test_a_shared_tier_outlives_its_hosts() -> None:
    hosts = HostPools(PoolRules(eviction=LeastRecentlyUsed))
    tier = added(hosts, A, SHARED)
    tier.fill([BLOCK])
    hosts.lose(A)
    assert added(hosts, A, SHARED).has(BLOCK)
    assert added(hosts, B, SHARED) is tier


def test_a_host_comes_back_with_another_capacity_of_its_store() -> None:
    hosts = HostPools(PoolRules(eviction=LeastRecentlyUsed))
    added(hosts, A, SHARED)
    hosts.lose(A)
    assert added(hosts, A, replace(SHARED, blocks_max=70)).blocks_max == 70


def test_a_store_in_use_keeps_its_capacity() -> None:
    """Its hosts share one object, and the first of them has announced the size."""
    hosts = HostPools(PoolRules(eviction=LeastRecentlyUsed))
    tier = added(hosts, A, SHARED)
    assert added(hosts, B, replace(SHARED, blocks_max=70)) is tier


def test_the_metadata_of_a_store_that_no_host_uses_is_dropped_when_another_joins() -> None:
    """Otherwise, the memory of the server grows with every store that it has ever seen."""
    hosts = HostPools(PoolRules(eviction=LeastRecentlyUsed))
    added(hosts, A, SHARED).fill([BLOCK])
    hosts.lose(A)
    added(hosts, B, replace(SHARED, shared_as="pool://elsewhere"))
    assert not added(hosts, A, SHARED).has(BLOCK)
