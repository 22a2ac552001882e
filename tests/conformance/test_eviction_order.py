"""What every eviction order must do, and what each of ours promises beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts, EvictionOrder
from baton.decide.policy.eviction import CostAware, LeastFrequentlyUsed, LeastRecentlyUsed
from baton.decide.policy.quota import TenantQuota

ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "cost": lambda: CostAware(even_tokens=40.0),
    "quota of lru": lambda: TenantQuota(blocks_max=2),
    "quota of lfu": lambda: TenantQuota(blocks_max=2, order="lfu"),
}
CHAIN_ENDS_ONLY = ("lfu", "cost")
orders = pytest.mark.parametrize("name", ORDERS)
Step = tuple[str, int, int]


def name_of(block: int) -> BlockHash:
    return BlockHash(f"name {block}".encode())


def facts_of(block: int, uses: int = 1) -> BlockFacts:
    """Block 0 stands before 1 and 2, those before 3, 4 and 5, 6, and so on: a tree. Odd ones are of tenant b."""
    parent = name_of((block - 1) // 2) if block else None
    return BlockFacts(name_of(block), parent, start_tokens=16 * block.bit_length(), tenant="ab"[block % 2], uses=uses)


steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), st.integers(0, 11), st.integers(1, 5)))


@orders
@given(steps=steps)
def test_it_holds_every_block_once_and_gives_up_each_that_it_holds(name: str, steps: list[Step]) -> None:
    order, held = ORDERS[name](), dict[int, int]()
    for verb, block, uses in steps:
        if verb == "add" and block not in held:
            order.add(BlockId(block), facts_of(block, uses))
            held[block] = uses
        elif verb == "remove" and block in held:
            order.remove(BlockId(block))
            del held[block]
        elif verb == "pop" and held:
            gone = order.pop()
            assert gone in held
            del held[gone]
            if name in CHAIN_ENDS_ONLY:
                behind = {name_of(other) for other in held if facts_of(other).parent == name_of(gone)}
                assert not behind, "a block went before those behind it"
        assert len(order) == len(held)
    assert sorted(order.pop() for _ in range(len(order))) == sorted(held)


@given(steps=steps)
def test_the_least_frequently_used_is_what_looking_at_all_of_them_finds(steps: list[Step]) -> None:
    """The oracle looks at every cached block each time: least worth of those with nothing behind them, oldest first."""
    order, held, floor = LeastFrequentlyUsed(remembered_max=0), dict[int, tuple[float, int]](), 0.0
    for number, (verb, block, uses) in enumerate(steps):
        if verb == "add" and block not in held:
            order.add(BlockId(block), facts_of(block, uses))
            held[block] = (floor + uses, number)
        elif verb == "remove" and block in held:
            order.remove(BlockId(block))
            del held[block]
        elif verb == "pop" and held:
            parents = {facts_of(other).parent for other in held}
            ends = [other for other in held if name_of(other) not in parents]
            expected = min(ends, key=lambda other: held[other])
            assert order.pop() == expected
            floor = max(floor, held.pop(expected)[0])


def test_what_was_popular_long_ago_ages_away() -> None:
    order = LeastFrequentlyUsed()
    order.add(BlockId(0), BlockFacts(name_of(0), uses=5))
    for block in range(1, 20):
        order.add(BlockId(block), BlockFacts(name_of(block), uses=1))
        gone = order.pop()
        if gone == 0:
            break
    else:
        pytest.fail("a block that nobody asked for any more outlived 19 others")


def test_the_end_of_a_long_prompt_is_dearer_than_that_of_a_short_one() -> None:
    order = CostAware(even_tokens=1000.0)
    order.add(BlockId(0), BlockFacts(name_of(0), start_tokens=2000))
    order.add(BlockId(1), BlockFacts(name_of(1), start_tokens=16))
    assert order.pop() == 1


def test_what_comes_back_is_worth_what_it_was() -> None:
    """Block 0 was used three times and given up. When it comes back it outlives a block that is new."""
    order = LeastFrequentlyUsed(remembered_max=1)
    order.add(BlockId(0), BlockFacts(name_of(0), uses=3))
    assert order.pop() == 0
    order.add(BlockId(0), BlockFacts(name_of(0)))
    order.add(BlockId(1), BlockFacts(name_of(1)))
    assert order.pop() == 1
    order.add(BlockId(2), BlockFacts(name_of(2)))
    assert order.pop() == 2
    assert len(order._past._uses) == 1, "no more names than it was told to remember"


def test_a_heap_does_not_grow_with_what_comes_and_goes() -> None:
    """INV-9: blocks of a cache that is never full come and go without an eviction."""
    order = LeastFrequentlyUsed()
    for number in range(5000):
        order.add(BlockId(number % 3), facts_of(number % 3))
        if len(order) == 3:
            for block in range(3):
                order.remove(BlockId(block))
    assert len(order._ends._heap) <= 2 * 3 + 64 + 1


def test_a_tenant_above_its_quota_loses_its_own_blocks_first() -> None:
    """Tenant a has two old blocks, tenant b floods the cache: a's stay until b is down to its quota."""
    order = TenantQuota(blocks_max=3)
    for block in (0, 1):
        order.add(BlockId(block), BlockFacts(name_of(block), tenant="a"))
    for block in range(2, 10):
        order.add(BlockId(block), BlockFacts(name_of(block), tenant="b"))
    assert [order.pop() for _ in range(5)] == [2, 3, 4, 5, 6]
    assert order.pop() == 0, "nobody is above the quota: the oldest goes"


def test_a_tenant_may_have_a_quota_of_its_own_and_use_room_that_is_free() -> None:
    order = TenantQuota(blocks_max=1, tenants={"big": 4})
    for block in range(4):
        order.add(BlockId(block), BlockFacts(name_of(block), tenant="big"))
    for block in (4, 5, 6):
        order.add(BlockId(block), BlockFacts(name_of(block), tenant="small"))
    assert len(order) == 7
    assert [order.pop() for _ in range(3)] == [4, 5, 0]
