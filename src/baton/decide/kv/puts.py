"""Puts: writes of a request's blocks into a tier, so that the request can continue on another host.

Every put ends (INV-1): each block that it waits for is in the queue of urgent blocks or is being written.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.tier_messages import PutEnded
from baton.core.types import BlockHash, BlockId, RequestId

BlockQueue = OrderedDict[BlockHash, BlockId]
"""Blocks to write to a tier, in order."""


@dataclass(slots=True)
class _Put:
    """One put. `left`: the blocks that the tier has neither stored nor given up yet."""

    request_id: RequestId
    tier: str
    left: set[BlockHash]


@dataclass(slots=True)
class Puts:
    """All puts of one host, by tier name."""

    blocks_max: int
    """Bound of the urgent blocks of each tier: the size of the arena. The arena may have evicted some of them."""
    _urgent: dict[str, BlockQueue] = field(default_factory=lambda: defaultdict[str, BlockQueue](OrderedDict))
    _waiting: dict[int, _Put] = field(default_factory=dict[int, _Put])
    run_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """By tier: the number of urgent blocks in one write, as requested by the newest put."""

    def urgent(self, tier: str) -> BlockQueue:
        """Return the queue of blocks to write first. A caller that removes a block must write it or call `settle`."""
        return self._urgent[tier]

    def wait(self, number: int, request_id: RequestId, tier: str, hashes: Iterable[BlockHash]) -> None:
        """Add a put. It ends once the tier has stored or given up each of these urgent blocks."""
        self._waiting[number] = _Put(request_id, tier, set(hashes))

    def trim(self, tier: str) -> int:
        """Give up the oldest urgent blocks beyond `blocks_max`. Return their number."""
        urgent = self._urgent[tier]
        dropped = [urgent.popitem(last=False)[0] for _ in range(len(urgent) - self.blocks_max)]
        self.settle(tier, dropped)
        return len(dropped)

    def rest(self, tier: str) -> None:
        """Give up all urgent blocks of a tier that this host stops using."""
        self.settle(tier, self._urgent[tier])
        self._urgent[tier].clear()

    def settle(self, tier: str, hashes: Iterable[BlockHash]) -> None:
        """Remove these blocks from the puts that wait for them: the tier has stored them or given them up."""
        settled = set(hashes)
        for put in self._of(tier):
            put.left -= settled

    def fail(self, tier: str, hashes: Iterable[BlockHash]) -> None:
        """Give up every put that waits for one of these blocks, because the tier has kept none of them.

        The other blocks of such a put are no longer urgent, so no other put waits for those either.
        """
        failed, urgent = set(hashes), self._urgent[tier]
        given_up: set[BlockHash] = set()
        for put in self._of(tier):
            if not put.left.isdisjoint(failed):
                given_up |= {block_hash for block_hash in put.left if urgent.pop(block_hash, None) is not None}
                put.left.clear()
        self.settle(tier, given_up | failed)

    def ended(self) -> list[PutEnded]:
        """Remove the puts that are done, and return an event for each."""
        numbers = [number for number, put in self._waiting.items() if not put.left]
        return [PutEnded(self._waiting.pop(number).request_id, number) for number in numbers]

    def clear(self) -> None:
        """Forget all puts, because their host is lost."""
        self._waiting.clear()

    def _of(self, tier: str) -> list[_Put]:
        return [put for put in self._waiting.values() if put.tier == tier]
