"""A store that one host cannot reach is left alone by that host, and by no other."""

from __future__ import annotations

import pytest

from baton.core.tier_messages import BlocksKept, LoadBlocks, LoadWanted, StoreBlocks, TierOpened, TierRests
from baton.core.types import BlockHash, BlockId, HostId, RequestId
from baton.decide.kv.blocks import BlockFacts, Blocks
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.kv.tiers import Tiers
from baton.decide.policy.eviction import LeastRecentlyUsed

THERE, NEW = BlockHash(b"there"), BlockHash(b"new")


def tier(name: str, shared_as: str = "") -> Tier:
    return Tier(TierRules(name=name, blocks_max=100, shared_as=shared_as), LeastRecentlyUsed)


@pytest.fixture
def hosts() -> tuple[Tiers, Tiers]:
    """Two hosts with one store, in which a block is."""
    book = tier("pool", shared_as="a store")
    near, far = (Tiers(host=HostId(name), arena=Blocks(8, LeastRecentlyUsed()), tiers=[book]) for name in "ab")
    near.handle(TierOpened("pool", (THERE,)))
    return near, far


def seal(made: Tiers, name: BlockHash) -> None:
    blocks, _ = made.arena.take(1)
    made.arena.seal(blocks[0], BlockFacts(name))
    made.arena.unpin(blocks)


def test_a_store_of_two_hosts_rests_for_the_one_that_cannot_reach_it(hosts: tuple[Tiers, Tiers]) -> None:
    near, far = hosts
    near.handle(TierRests("pool", rests=True))
    for host in hosts:
        seal(host, NEW)
    assert near.write_back() == []
    (store,) = far.write_back()
    assert isinstance(store, StoreBlocks)
    far.handle(BlocksKept(store.number, (True,)))
    (load,) = far.handle(LoadWanted(RequestId("r"), 1, (THERE,), (BlockId(5),)))
    (nothing,) = near.handle(LoadWanted(RequestId("r"), 1, (THERE,), (BlockId(5),)))
    assert isinstance(load, LoadBlocks)
    assert isinstance(nothing, LoadBlocks)
    assert (load.hashes, nothing.hashes) == ((THERE,), ())


def test_what_waited_is_written_when_the_rest_is_over(hosts: tuple[Tiers, Tiers]) -> None:
    near, _ = hosts
    near.handle(TierRests("pool", rests=True))
    seal(near, NEW)
    assert near.write_back() == []
    near.handle(TierRests("pool", rests=False))
    (store,) = near.write_back()
    assert isinstance(store, StoreBlocks)
    assert store.hashes == (NEW,)


@pytest.mark.parametrize("side", [0, 1])
def test_nothing_is_handed_over_by_a_store_that_either_host_cannot_reach(hosts: tuple[Tiers, Tiers], side: int) -> None:
    near, far = hosts
    assert near.shared_with(far) is near.tiers[0]
    hosts[side].handle(TierRests("pool", rests=True))
    assert near.shared_with(far) is None


def test_the_fastest_tier_is_one_that_can_be_reached() -> None:
    made = Tiers(host=HostId("a"), arena=Blocks(8, LeastRecentlyUsed()), tiers=[tier("file"), tier("pool")])
    assert made.fastest is made.tiers[0]
    made.handle(TierRests("file", rests=True))
    assert made.fastest is made.tiers[1]
