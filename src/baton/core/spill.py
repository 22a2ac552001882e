"""Messages and block ids of the spill space, which holds cold KV blocks of running requests that outgrow the arena."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from msgspec import Struct

from baton.core.types import BlockId, RequestId, WorkerId

SPILLED_FROM = 2**30
"""Block ids from here on name slots of the spill space (`id - SPILLED_FROM`). Lower ids name blocks of the arena."""


def spilled_blocks(table: Sequence[BlockId]) -> int:
    """Return the number of leading entries of a block table that are in the spill space."""
    if not table or table[0] < SPILLED_FROM:
        return 0
    return sum(1 for _ in takewhile(lambda block: block >= SPILLED_FROM, table))


def with_slots(table: tuple[BlockId, ...], first: int, slots: Sequence[int]) -> tuple[BlockId, ...]:
    """Return a block table that names slots from index `first` on, in place of as many blocks."""
    ids = tuple(BlockId(SPILLED_FROM + slot) for slot in slots)
    return table[:first] + ids + table[first + len(ids) :]


class SpillBlocks(Struct, frozen=True, tag=True, gc=False):
    """Order to copy sealed blocks of a running request to slots of the spill space, between two steps.

    The request's table names the slots from then on. The worker answers with BlocksSpilled.
    """

    request_id: RequestId
    attempt: int
    first: int
    """Index of the first block in the table."""
    blocks: tuple[BlockId, ...]
    slots: tuple[int, ...]


class BlocksSpilled(Struct, frozen=True, tag=True, gc=False):
    """The worker has copied the blocks and no longer reads them in the arena."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    first: int
    """That of the order."""
