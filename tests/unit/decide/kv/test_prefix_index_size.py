"""INV-9: what a million blocks take in the prefix index, as docs/handoff-and-tiers.md states it."""

from __future__ import annotations

import tracemalloc

import pytest

from baton.core.types import BlockHash, HostId
from baton.decide.kv.hashing import HASH_BYTES
from baton.decide.kv.prefix_index import PrefixIndex

BLOCKS = 25_000
"""Tables grow by doubling: a 40th of a million fills them as a million does."""
STATED_BYTES = 150
"""Of one block, its own hash included."""


@pytest.mark.parametrize("holders", [1, 20])
def test_a_block_takes_no_more_than_stated(holders: int) -> None:
    index = PrefixIndex()
    hosts = [HostId(f"host-{number}") for number in range(64)]
    tracemalloc.start()
    for first in range(0, BLOCKS, 1000):
        names = [BlockHash(number.to_bytes(HASH_BYTES)) for number in range(first, first + 1000)]
        for place in range(holders):
            index.store(hosts[(first // 1000 + place) % len(hosts)], names)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == BLOCKS
    assert taken / BLOCKS <= STATED_BYTES, f"{taken / BLOCKS:.0f} bytes a block"
