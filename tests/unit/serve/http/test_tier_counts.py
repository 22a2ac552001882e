"""What /metrics says of tiers: each host's own, and what hosts share once."""

from __future__ import annotations

from baton.core.types import HostId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from baton.serve.live.tiers import kv_blocks, pool_tiers

OWN = TierRules(name="file", blocks_max=7)
SHARED = TierRules(name="pool", blocks_max=50, shared_as="pool://somewhere")


def test_every_hosts_own_tier_is_counted_and_a_shared_one_once() -> None:
    """Before, only the last host's were shown, and the shared one at whichever that was."""
    pools: list[HostPool] = []
    for name in ("a", "b"):
        tiers = pool_tiers((OWN, SHARED), LeastRecentlyUsed, others=pools)
        pools.append(
            HostPool(host=HostId(name), blocks_total=3, block_tokens=4, eviction=LeastRecentlyUsed, tiers=tiers)
        )
    counted = [(tier, view.id, view.blocks_total) for tier, view in kv_blocks(pools)]
    assert counted == [("host", "a", 3), ("host", "b", 3), ("file", "a", 7), ("pool", "a", 50), ("file", "b", 7)]
