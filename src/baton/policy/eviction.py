"""Eviction: which cached block is given up when a request needs room."""

from __future__ import annotations

from collections import OrderedDict

from baton.core.types import BlockId


class LeastRecentlyUsed:
    """Give up the block that was unpinned longest ago: prompts that come back, come back soon."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def add(self, block: BlockId) -> None:
        """See `EvictionOrder.add`."""
        self._order[block] = None

    def remove(self, block: BlockId) -> None:
        """See `EvictionOrder.remove`."""
        del self._order[block]

    def pop(self) -> BlockId:
        """See `EvictionOrder.pop`."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)
