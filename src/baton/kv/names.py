"""What a host's arena has by name, and the news of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.types import BlockHash, BlockId, HostId, HostView
from baton.kv.blocks import BlockFacts, Blocks, EvictionOrder
from baton.kv.tier import Tier
from baton.kv.tiers import BackedFirst, Tiers


@dataclass(frozen=True, slots=True)
class Names:
    """Blocks get names here and lose them."""

    host: HostId
    block_tokens: int
    block_runs: int
    """Hashed runs of tokens that a block has."""
    blocks: Blocks
    tiers: Tiers | None

    def seal(
        self, table: Sequence[BlockId], first: int, hashes: Sequence[BlockHash], tenant: str
    ) -> list[BlocksStored]:
        """Seal the blocks `first` .. of a request's table under their hashes. Tells of those that were not here."""
        before = self.blocks.facts(table[first - 1]) if 0 < first <= len(table) else None
        parent = before.name if before is not None else None
        stored: list[BlockHash] = []
        for depth, (block, name) in enumerate(zip(table[first:], hashes, strict=False), first):
            is_backed = self.tiers is not None and self.tiers.has(name)
            facts = BlockFacts(name, parent, depth * self.block_tokens, tenant, is_backed=is_backed)
            if self.blocks.seal(block, facts):
                stored.append(name)
            parent = name
        return [BlocksStored(self.host, tuple(stored), self.block_runs)] if stored else []

    def take(self, count: int) -> tuple[list[BlockId], list[BlocksRemoved]]:
        """Take blocks for a request. Tells of what was given up for them; a tier may have it."""
        taken, lost = self.blocks.take(count)
        return taken, [BlocksRemoved(self.host, tuple(lost))] if lost else []

    def view(self) -> HostView:
        """Count the blocks of the arena by state."""
        return HostView(
            id=self.host,
            blocks_total=self.blocks.total,
            blocks_free=self.blocks.free,
            blocks_used=self.blocks.used,
            blocks_cached=self.blocks.cached,
        )

    def check(self, pins: Sequence[int]) -> None:
        """Assert that the pins are those of requests, which are given, and of writes to the tiers."""
        expected = list(pins)
        for block in self.tiers.pinned() if self.tiers is not None else ():
            expected[block] += 1
        self.blocks.check(expected)


class _Host(Protocol):
    host: HostId
    block_tokens: int
    block_runs: int


def named_blocks(pool: _Host, blocks_total: int, eviction: Callable[[], EvictionOrder], tiers: Sequence[Tier]) -> Names:
    """Make the blocks of a host's empty arena, with these tiers below it, if any."""
    blocks = Blocks(blocks_total, BackedFirst(eviction) if tiers else eviction())
    below = Tiers(host=pool.host, arena=blocks, tiers=tiers) if tiers else None
    return Names(pool.host, pool.block_tokens, pool.block_runs, blocks, below)
