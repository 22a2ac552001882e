"""A tier whose disk turns out to be smaller gives up what it has no place for, and tells how much is free."""

from __future__ import annotations

import tracemalloc

import pytest

from baton.core.tier_messages import BlocksKept, DropBlocks, StoreBlocks, TierOpened, TierShrunk
from baton.core.types import BlockHash, HostId
from baton.decide.kv.blocks import BlockFacts, Blocks
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.kv.tiers import Tiers
from baton.decide.policy.eviction import LeastRecentlyUsed

NAMES = [BlockHash(b"%d" % number) for number in range(6)]


def test_a_tier_that_shrinks_gives_up_the_oldest() -> None:
    tier = Tier(TierRules(name="file", blocks_max=6), LeastRecentlyUsed)
    assert tier.fill(NAMES[:5]) == []
    assert tier.shrink(3) == NAMES[:2]
    view = tier.view()
    assert (view.blocks_total, view.blocks_cached) == (3, 3)
    assert tier.shrink(3) == []
    begun = tier.begin_write(BlockFacts(NAMES[5]))
    assert begun is not None
    assert begun[1] == [NAMES[2]], "there is no place but that of another"


def test_what_is_in_use_stays() -> None:
    tier = Tier(TierRules(name="file", blocks_max=3), LeastRecentlyUsed)
    tier.fill(NAMES[:3])
    tier.begin_load(NAMES[:2])
    assert tier.shrink(0) == [NAMES[2]]
    assert tier.view().blocks_total == 2


def test_what_goes_when_a_store_lists_more_than_fits_is_no_longer_backed() -> None:
    """The mover has died, and the next one lists the store: blocks missing there exist in the arena only."""
    arena, tier = Blocks(2, LeastRecentlyUsed()), Tier(TierRules(name="file", blocks_max=1), LeastRecentlyUsed)
    tiers = Tiers(host=HostId("h"), arena=arena, tiers=[tier])
    (block,), _ = arena.take(1)
    arena.seal(block, BlockFacts(NAMES[0]))
    arena.unpin((block,))
    (store,) = tiers.write_back()
    assert isinstance(store, StoreBlocks)
    tiers.handle(BlocksKept(store.number, (True,)))
    facts = arena.facts(block)
    assert facts is not None
    assert facts.is_backed
    assert tiers.handle(TierOpened("file", (NAMES[1],))) == [DropBlocks(HostId("h"), "file", (NAMES[0],))]
    assert not facts.is_backed


def test_news_of_a_tier_that_is_not_there_change_nothing() -> None:
    tier = Tier(TierRules(name="file", blocks_max=6), LeastRecentlyUsed)
    tiers = Tiers(host=HostId("h"), arena=Blocks(2, LeastRecentlyUsed()), tiers=[tier])
    tier.fill(NAMES)
    assert tiers.handle(TierOpened("tape", (NAMES[1],))) == []
    assert tiers.handle(TierShrunk("tape", 1)) == []
    assert tier.view().blocks_cached == len(NAMES)


@pytest.mark.parametrize(
    ("latency_s", "block_s", "blocks"), [(0.0, 0.0, 9), (0.5, 0.0, 9), (0.5, 0.25, 2), (1.0, 0.0, 0), (3.0, 0.0, 0)]
)
def test_a_read_is_as_long_as_it_may_last(latency_s: float, block_s: float, blocks: int) -> None:
    rules = TierRules(name="file", blocks_max=9, latency_s=latency_s, block_load_s=block_s, load_s_max=1.0)
    assert Tier(rules, LeastRecentlyUsed).readable_blocks == blocks


def test_a_tier_of_no_known_size_has_nothing_free() -> None:
    tier = Tier(TierRules(name="pool", blocks_max=1000, is_sized=False), LeastRecentlyUsed)
    tier.fill(NAMES)
    view = tier.view()
    assert view.blocks_total == view.blocks_cached == len(NAMES)


def test_a_tier_needs_memory_for_the_blocks_that_it_has_held_only() -> None:
    """A store that is not open yet counts as a million blocks, and may turn out to have room for few."""
    tracemalloc.start()
    tier = Tier(TierRules(name="file", blocks_max=1_000_000), LeastRecentlyUsed)
    tier.fill(NAMES)
    assert tier.shrink(4) == NAMES[:2]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
    view = tier.view()
    assert (view.blocks_total, view.blocks_cached) == (4, 4)
    assert tier.fill(NAMES[:2]) == NAMES[2:4], "there is no place but that of another"
