"""What one request has on one host."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.core.copies import LandingGranted
from baton.core.messages import BlocksGranted, ToWorker
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId

KEPT_FREE_RATIO = 0.5
"""Share of an arena that is kept free of blocks granted beyond a request's need."""


def _no_names() -> list[BlockHash]:
    """Make an empty list: `list[BlockHash]` makes one, too, and takes several times as long."""
    return []


@dataclass(slots=True)
class Holding:
    """The blocks of one request on this host, and the worker that may touch them."""

    request: Request
    attempt: int
    user: WorkerId | None
    """The worker that may read and write the blocks now. None between two workers."""
    table: tuple[BlockId, ...] = ()
    """Replaced when it grows, so that workers and transfers share this tuple instead of copies."""
    behind: int = 0
    """Leading entries of the table that it no longer holds, or never did: nobody looks at them, and what stands there
    means nothing."""
    names: list[BlockHash] = field(default_factory=_no_names)
    """Of its leading sealed blocks."""
    computed_tokens: int = 0
    """Leading tokens whose KV is certainly in the table: sealed blocks, and a tail that a living worker vouched for."""
    wanted: int = 0
    """How long the table shall become. Equal to its length, or less, where nothing is wanted."""
    prefix: tuple[BlockHash, ...] = ()
    released: bool = False
    preempting: bool = False
    preempted: bool = False
    """Its blocks were taken from it, and it has got none since: a tier may have what it had."""
    reading: bool = False
    """What tiers have of its KV is read into its table, or it is asked whether to. Its worker does not know of it."""
    landing: bool = False
    """Its KV comes over from another host: first the blocks are waited for, then a wire writes into them."""
    leases: int = 0
    """Wires that read its blocks, and reads from tiers into them."""
    leased: tuple[BlockId, ...] = ()
    """What they may touch, pinned once more for each of them."""

    @property
    def held(self) -> tuple[BlockId, ...]:
        """The blocks that it has."""
        return self.table[self.behind :] if self.behind else self.table

    @property
    def blocks(self) -> int:
        """How many it has."""
        return len(self.table) - self.behind if self.table else 0

    def goal(self, done_blocks: int, ahead_blocks: int | None) -> int:
        """How long its table shall be now that so many leading blocks are done.

        `ahead_blocks`: no more than so many beyond those are given at a time. None, or for one that does not tell what
        it has done: all that it wants.
        """
        if ahead_blocks is None or self.landing or not self.request.shares_blocks:
            return self.wanted
        return min(self.wanted, done_blocks + ahead_blocks)

    @property
    def is_touched(self) -> bool:
        """A worker or a wire may read or write the blocks now."""
        return self.user is not None or self.leases > 0 or (self.landing and bool(self.table))

    def is_computed_by(self, worker: WorkerId, attempt: int) -> bool:
        """Tell whether this worker computes in the blocks, and they are not about to be preempted."""
        return (self.user, self.attempt) == (worker, attempt) and not (self.preempting or self.released)

    @property
    def names_kept(self) -> tuple[BlockHash, ...]:
        """Hashes of its leading sealed blocks; none where it is about to lose them."""
        return () if self.preempting or self.released else tuple(self.names)

    @property
    def age(self) -> tuple[int, float, RequestId]:
        """Less is served first and preempted last. The id breaks ties, so that every run decides alike."""
        return (self.request.priority, self.request.arrived_at_s, self.request.id)

    def stock_blocks(self, count: int, spare_blocks: int, block_tokens: int) -> int:
        """Count the blocks that it is given beyond the `count` that it asks for, so that it asks less often.

        Free blocks beyond the pool's `kept_free_blocks` are spare; `spare_blocks` is an equal part of them, or below 0.
        No block is evicted and no request preempted for a stock. It at most doubles the blocks of a request, and
        never exceeds the need of its longest output.
        What comes over a wire gets what it asked for: a copy was planned for that.
        """
        if spare_blocks <= 0 or self.landing:
            return 0
        most_blocks = -(-(self.request.prompt_tokens + self.request.output_tokens_max) // block_tokens)
        has_blocks = len(self.table) + count
        return max(0, min(spare_blocks, has_blocks, most_blocks - has_blocks))


def granted(holding: Holding, host: HostId, block_tokens: int, *, cached_blocks: int = 0) -> ToWorker | LandingGranted:
    """Tell the worker, or the wire, that waits for them of a request's blocks.

    `cached_blocks`: of a worker's, that need not be computed. See `BlocksGranted`.
    """
    request_id, table = holding.request.id, holding.table
    if holding.landing:
        done_blocks = max(holding.behind, holding.computed_tokens // block_tokens)
        return LandingGranted(host, request_id, holding.attempt, table, done_blocks)
    assert holding.user is not None, f"{request_id} is granted blocks while no worker runs it"
    assert not holding.reading, f"{request_id} is granted blocks while they are read into"
    return ToWorker(holding.user, BlocksGranted(request_id, holding.attempt, table, cached_blocks))


def idle_younger(holdings: Iterable[Holding], than: Holding) -> list[Holding]:
    """List younger requests whose blocks no worker or wire touches now, the youngest first."""
    idle = [held for held in holdings if held.table and not held.is_touched and held.age > than.age]
    return sorted(idle, key=lambda held: held.age, reverse=True)


def youngest_to_preempt(holdings: Collection[Holding], growing: Holding) -> Holding | None:
    """Choose whose blocks are taken back: not what gives them back already, nor what a wire reads or writes.

    Nor holdings that are read back: a request that grows waits until such a read has ended.
    """
    victims = [
        held
        for held in holdings
        if held.table and not (held.preempting or held.released or held.landing or held.leases)
    ]
    victim = max(victims, key=lambda held: held.age, default=None)
    return None if victim is growing and any(held.reading for held in holdings) else victim
