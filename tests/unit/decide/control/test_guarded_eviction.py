"""A user's own eviction that breaks its contract is put aside, and no block is lost or given up twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.core.config import Plugin
from baton.core.types import BlockHash, BlockId
from baton.decide.control.guarded_eviction import GuardedEviction, eviction_maker
from baton.decide.kv.blocks import BlockFacts
from baton.decide.policy.eviction import LeastRecentlyUsed

A, B, C, NOBODY = (BlockId(block) for block in (3, 1, 2, 99))
FACTS = BlockFacts(BlockHash(b"name"), None, 0)


@dataclass
class Newest:
    """Gives up what came last, until `works` is over; then it does what `then` says."""

    works: int
    then: object = None
    blocks: list[BlockId] = field(default_factory=list[BlockId])

    def _work(self) -> None:
        self.works -= 1
        if self.works < 0 and isinstance(self.then, Exception):
            raise self.then

    def add(self, block: BlockId, facts: BlockFacts) -> None:
        self._work()
        self.blocks.append(block)

    def remove(self, block: BlockId) -> None:
        self._work()
        self.blocks.remove(block)

    def pop(self) -> BlockId:
        self._work()
        return self.blocks.pop() if self.works >= 0 else self.then  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(self.blocks)


def filled(own: Newest) -> tuple[GuardedEviction, list[str]]:
    told: list[str] = []
    order = GuardedEviction(own, told.append)
    for block in (A, B, C):
        order.add(block, FACTS)
    return order, told


def test_it_decides_as_long_as_it_keeps_its_contract() -> None:
    order, told = filled(Newest(works=100))
    assert (order.pop(), len(order)) == (C, 2)
    order.remove(B)
    assert (order.pop(), len(order), told) == (A, 0, [])


@pytest.mark.parametrize("works", range(5), ids=["add", "add", "add", "remove", "pop"])
def test_wherever_it_raises_the_oldest_goes_from_then_on_and_that_is_told_once(works: int) -> None:
    order, told = filled(Newest(works=works, then=RuntimeError("boom")))
    order.remove(B)
    assert [order.pop(), order.pop()] == [A, C]
    assert len(order) == 0
    (words,) = told
    assert words.startswith("the policy Newest failed: RuntimeError: boom; the least recently used block")


def test_what_equals_a_cached_block_is_given_up_as_that_block() -> None:
    """The pool looks up lists by it: a number with a point would end the server."""
    order, told = filled(Newest(works=3, then=float(B)))
    given_up = order.pop()
    assert (given_up, type(given_up), told) == (B, int, [])


@pytest.mark.parametrize("given_up", [NOBODY, None, [1]], ids=["unknown", "nothing", "unhashable"])
def test_what_is_not_cached_cannot_be_given_up(given_up: object) -> None:
    order, told = filled(Newest(works=3, then=given_up))
    assert [order.pop(), order.pop(), order.pop()] == [A, B, C]
    assert told == [
        f"the policy Newest failed: ValueError: it gave up block {given_up!r}, which is not cached; "
        "the least recently used block is given up instead, from now on"
    ]


def test_ours_are_asked_directly() -> None:
    make = eviction_maker(Plugin(use="lru"), lambda why: None)
    assert type(make()) is LeastRecentlyUsed
