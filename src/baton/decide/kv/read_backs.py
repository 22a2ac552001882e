"""Swap-in of preempted requests: KV is read from tiers into their new blocks before they continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from baton.core.messages import PoolCommand
from baton.core.tier_messages import LoadEnded, LoadWanted, ReadBack, ReadBackWanted
from baton.core.types import BlockHash, HostId
from baton.decide.kv.arena_blocks import ArenaBlocks
from baton.decide.kv.holding import Holding, granted


@dataclass(frozen=True, slots=True)
class _Read:
    attempt: int
    first: int
    """Index in the table of the first block to read."""
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class ReadBacks:
    """The swap-ins of one host: at most one per attempt of a request, and each of them ends.

    The blocks are leased until the read has ended, even if the request ends before.
    """

    host: HostId
    block_tokens: int
    arena: ArenaBlocks
    settle: Callable[[Holding], None]
    """Frees a holding's blocks after the end of a lease, if they were to be freed meanwhile."""
    _under_way: dict[int, _Read] = field(default_factory=dict[int, _Read])

    def request_read(self, holding: Holding, holdings: Iterable[Holding]) -> ReadBackWanted | None:
        """Return the event that asks how much KV to read for a request with new blocks. None: no tier has any of it.

        `holdings`: all holdings of the host.
        """
        held, hashes = len(holding.hashes), holding.prefix[: len(holding.table)]
        if holding.user is None or self.arena.tiers is None or not self.arena.tiers.find(hashes[held : held + 1]):
            return None
        holding.reading = True
        self.arena.lease(holding)
        beside = sum(held.user == holding.user and bool(held.table) for held in holdings) - 1
        return ReadBackWanted(holding.request.id, self.host, holding.user, hashes, beside)

    def handle(self, holding: Holding | None, event: ReadBack | LoadEnded) -> list[PoolCommand]:
        """Begin a read, or grant the blocks after one has ended. Reads for other purposes are passed to the tiers only.

        `holding`: the holding of the event's request.
        """
        told: list[PoolCommand] = []
        if isinstance(event, LoadEnded) and self.arena.tiers is not None:
            told += self.arena.tiers.handle(event)
        if holding is None:
            return told
        return told + (self._begin(holding, event) if isinstance(event, ReadBack) else self._end(holding, event))

    def _begin(self, holding: Holding, event: ReadBack) -> list[PoolCommand]:
        """Begin the read that was decided. If nothing is to be read, grant the blocks at once."""
        first, end = len(holding.hashes), event.tokens // self.block_tokens
        assert holding.reading, f"{event.request_id} does not wait for a decision to read it back"
        if end <= first or self.arena.tiers is None:
            return [self._go_on(holding)]
        hashes = holding.prefix[first:end]
        self._under_way[event.number] = _Read(holding.attempt, first, hashes)
        wanted = LoadWanted(event.request_id, event.number, hashes, tuple(holding.table[first:end]), back=True)
        return [*self.arena.tiers.handle(wanted)]

    def _end(self, holding: Holding, event: LoadEnded) -> list[PoolCommand]:
        """Seal the blocks that were read, and grant the table: the worker computes the rest."""
        read = self._under_way.pop(event.number, None)
        if read is None:
            return []
        if not holding.reading or holding.attempt != read.attempt or holding.released:
            # the request has continued without this read, or has ended
            self.arena.end_lease(holding)
            self.settle(holding)
            return []
        there = read.first + sum(takewhile(bool, event.whole))
        holding.computed_tokens = there * self.block_tokens
        told = self.arena.seal(holding, read.first, read.hashes[: there - read.first])
        return [*told, self._go_on(holding)]

    def _go_on(self, holding: Holding) -> PoolCommand:
        holding.reading = False
        self.arena.end_lease(holding)
        return granted(holding, self.host, self.block_tokens, cached_blocks=len(holding.hashes))
