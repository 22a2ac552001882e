"""Blocks that are put into tiers so that requests can go on from them elsewhere, and the puts that wait for them.

A put ends, whatever becomes of its blocks (INV-1): what it waits for is urgent, or is being written.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core.tier_messages import PutEnded
from baton.core.types import BlockHash, BlockId, RequestId

BlockQueue = OrderedDict[BlockHash, BlockId]
"""Blocks that are to be written to a tier, the first first."""


@dataclass(slots=True)
class _Put:
    """Blocks that a handoff waits for: until the tier has them, or is known not to get them."""

    request_id: RequestId
    tier: str
    left: set[BlockHash]


@dataclass(slots=True)
class Puts:
    """All puts of one host. Tiers are told apart by their names."""

    blocks_max: int
    """Of each tier, how many may be urgent: as many as the arena has. It may have given some of them up by now."""
    _urgent: dict[str, BlockQueue] = field(default_factory=lambda: defaultdict[str, BlockQueue](OrderedDict))
    _waiting: dict[int, _Put] = field(default_factory=dict[int, _Put])
    run_blocks: dict[str, int] = field(default_factory=dict[str, int])
    """Of each tier, how many urgent blocks are written at once, as the newest put wants it."""

    def urgent(self, tier: str) -> BlockQueue:
        """Return the blocks that are written first. A caller that removes a block writes it, or settles it."""
        return self._urgent[tier]

    def wait(self, number: int, request_id: RequestId, tier: str, names: Iterable[BlockHash]) -> None:
        """Tell that these blocks, which are urgent or being written, are in the tier, or will not get there."""
        self._waiting[number] = _Put(request_id, tier, set(names))

    def trim(self, tier: str) -> int:
        """Give up the urgent blocks that wait longest, where there are too many. Returns how many those were."""
        urgent = self._urgent[tier]
        dropped = [urgent.popitem(last=False)[0] for _ in range(len(urgent) - self.blocks_max)]
        self.settle(tier, dropped)
        return len(dropped)

    def rest(self, tier: str) -> None:
        """Give up all that is urgent: the tier is left alone."""
        self.settle(tier, self._urgent[tier])
        self._urgent[tier].clear()

    def settle(self, tier: str, names: Iterable[BlockHash]) -> None:
        """Wait for these blocks no longer."""
        settled = set(names)
        for put in self._of(tier):
            put.left -= settled

    def fail(self, tier: str, names: Iterable[BlockHash]) -> None:
        """The tier has kept none of these. Nothing else of the puts that have waited for them is tried.

        Their other blocks are no longer urgent, so no other put waits for those either.
        """
        failed, urgent = set(names), self._urgent[tier]
        given_up: set[BlockHash] = set()
        for put in self._of(tier):
            if not put.left.isdisjoint(failed):
                given_up |= {name for name in put.left if urgent.pop(name, None) is not None}
                put.left.clear()
        self.settle(tier, given_up | failed)

    def ended(self) -> list[PutEnded]:
        """Take out the puts that wait for nothing any more."""
        numbers = [number for number, put in self._waiting.items() if not put.left]
        return [PutEnded(self._waiting.pop(number).request_id, number) for number in numbers]

    def clear(self) -> None:
        """Forget all puts: their host is lost."""
        self._waiting.clear()

    def _of(self, tier: str) -> list[_Put]:
        return [put for put in self._waiting.values() if put.tier == tier]
