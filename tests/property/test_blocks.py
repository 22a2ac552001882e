"""INV-4: blocks are conserved and pins are exactly those of their owners, whatever is taken, sealed and given back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts, Blocks
from baton.decide.policy.eviction import LeastRecentlyUsed

TOTAL = 8


def name(stream: int, depth: int) -> BlockHash:
    """Name block `depth` of one of few prompts: two owners of one prompt seal the same names."""
    return BlockHash(f"{stream}/{depth}".encode())


class BlocksAgainstAModel(RuleBasedStateMachine):
    """Owners hold tables of blocks; the model knows names and the order of unpinning, and predicts each answer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(TOTAL, LeastRecentlyUsed())
        self.tables: list[list[BlockId]] = []
        self.streams: list[int] = []
        self.named: list[int] = []
        self.names: dict[BlockHash, BlockId] = {}
        self.lru: list[BlockId] = []

    def pins(self) -> Counter[BlockId]:
        return Counter(block for table in self.tables for block in table)

    @rule(stream=st.integers(0, 2), depth=st.integers(0, 4))
    def open(self, stream: int, depth: int) -> None:
        """A new owner takes the prefix that is there, as the pool does it."""
        hashes = [name(stream, index) for index in range(depth)]
        expected: list[BlockId] = []
        for wanted in hashes:
            if wanted not in self.names:
                break
            expected.append(self.names[wanted])
        found = self.blocks.hit(hashes, None, 4).blocks
        assert found == expected
        assert self.blocks.unpinned(found) == sum(block in self.lru for block in found)
        self.blocks.pin(found)
        self.lru = [block for block in self.lru if block not in found]
        self.tables.append(found)
        self.streams.append(stream)
        self.named.append(len(found))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """Free blocks go first, then cached ones in the order in which they were unpinned."""
        count = data.draw(st.integers(0, self.blocks.available))
        owner = data.draw(st.integers(0, len(self.tables) - 1))
        victims = self.lru[: max(0, count - self.blocks.free)]
        by_block = {block: wanted for wanted, block in self.names.items()}
        taken, evicted = self.blocks.take(count)
        assert evicted == [by_block[block] for block in victims]
        assert not set(taken) & set(self.pins()), "a block was given to two owners"
        for victim in victims:
            del self.names[by_block[victim]]
        self.lru = self.lru[len(victims) :]
        self.tables[owner].extend(taken)

    @precondition(lambda self: any(map(len, self.tables)))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """A second block with the same hash stays unsealed: it could never be found."""
        owner = data.draw(st.integers(0, len(self.tables) - 1))
        depth = self.named[owner]
        if depth == len(self.tables[owner]):
            return
        block, wanted = self.tables[owner][depth], name(self.streams[owner], depth)
        assert self.blocks.seal(block, BlockFacts(wanted)) == (wanted not in self.names)
        self.names.setdefault(wanted, block)
        self.named[owner] += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Sealed blocks become cached, deepest first; the others are free at once."""
        owner = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(owner)
        del self.streams[owner], self.named[owner]
        self.blocks.unpin(table)
        still, sealed = self.pins(), set(self.names.values())
        self.lru += [block for block in reversed(table) if block in sealed and not still[block]]

    @invariant()
    def conserved(self) -> None:
        pins = self.pins()
        self.blocks.check([pins[BlockId(block)] for block in range(TOTAL)])
        assert self.blocks.used == len(pins)
        assert self.blocks.cached == len(self.lru)
        assert self.blocks.free + self.blocks.used + self.blocks.cached == TOTAL

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.unpin(table)
        self.blocks.check([0] * TOTAL)
        assert self.blocks.used == 0
        assert self.blocks.available == TOTAL


TestBlocks = BlocksAgainstAModel.TestCase


@pytest.mark.parametrize("block", [0, 1, TOTAL - 1])
def test_a_free_block_is_not_unpinned_into_another_owners_hands(block: int) -> None:
    """Others have blocks meanwhile, so that the numbers alone would still add up."""
    blocks = Blocks(TOTAL, LeastRecentlyUsed())
    taken, _ = blocks.take(4)
    blocks.seal(taken[3], BlockFacts(name(0, 0)))
    blocks.unpin(taken[:2])
    with pytest.raises(AssertionError, match=f"block {block} is unpinned more often than it was pinned"):
        blocks.unpin([BlockId(block)])
    assert len(set(blocks.take(6)[0])) == 6
