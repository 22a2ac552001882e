"""The holding of one request: its blocks on one host."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from baton.core.copies import LandingGranted
from baton.core.messages import BlocksGranted, ToWorker
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId

KEPT_FREE_RATIO = 0.5
"""Share of an arena that is kept free of blocks granted beyond a request's need."""


def _no_hashes() -> list[BlockHash]:
    """Return an empty list, several times as fast as `list[BlockHash]()`."""
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
    """Leading entries of the table that are not held in the arena. Behind an attention window, their block ids have no
    meaning and are never read. Without a window, they name slots of the spill space."""
    spilling: tuple[BlockId, ...] = ()
    """Arena blocks that a worker is to copy to the spill space. Their table entries, the last ones of `behind`, already
    name the slots."""
    hashes: list[BlockHash] = field(default_factory=_no_hashes)
    """Hashes of the leading sealed blocks."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the table: sealed blocks, and a tail that a live worker has reported."""
    wanted: int = 0
    """Requested length of the table in blocks. At most its current length if no blocks are wanted."""
    prefix: tuple[BlockHash, ...] = ()
    released: bool = False
    preempting: bool = False
    preempted: bool = False
    """The request was preempted and has no blocks since. Tiers may hold copies of its blocks."""
    reading: bool = False
    """KV is read from tiers into the table, or that decision is pending. The worker gets the table only afterwards."""
    landing: bool = False
    """KV arrives from another host: the request waits for blocks, then a transfer writes into them."""
    leases: int = 0
    """Number of transfers that read the blocks, and of reads from tiers into them."""
    leased: tuple[BlockId, ...] = ()
    """Blocks of the leases. Each lease pins its blocks once more."""

    @property
    def held(self) -> tuple[BlockId, ...]:
        """Blocks of the table that the request holds in the arena."""
        return self.table[self.behind :] if self.behind else self.table

    @property
    def blocks(self) -> int:
        """Number of held blocks."""
        return len(self.table) - self.behind + len(self.spilling) if self.table else 0

    def goal(self, done_blocks: int, ahead_blocks: int | None) -> int:
        """Return the length that the table may have now, in blocks.

        With an attention window, that is at most `ahead_blocks` beyond the `done_blocks` computed ones. It is all
        wanted blocks without a window, while KV lands, and for requests that seal no blocks.
        """
        if ahead_blocks is None or self.landing or not self.request.shares_blocks:
            return self.wanted
        return min(self.wanted, done_blocks + ahead_blocks)

    @property
    def is_touched(self) -> bool:
        """A worker or a transfer may read or write the blocks now."""
        return self.user is not None or self.leases > 0 or (self.landing and bool(self.table))

    def is_computed_by(self, worker: WorkerId, attempt: int) -> bool:
        """Return whether this worker uses the blocks, and no preemption or release is pending."""
        return (self.user, self.attempt) == (worker, attempt) and not (self.preempting or self.released)

    @property
    def hashes_kept(self) -> tuple[BlockHash, ...]:
        """Hashes of the leading sealed blocks; empty if a preemption or release is pending."""
        return () if self.preempting or self.released else tuple(self.hashes)

    @property
    def age(self) -> tuple[int, int, float, RequestId]:
        """Sort key: lower values are served first and preempted last. The id makes ties deterministic."""
        request = self.request
        if request.turn:
            return (0, request.turn_key, request.arrived_at_s, request.id)
        return (request.priority, 0, request.arrived_at_s, request.id)

    def advance_blocks(self, count: int, spare_blocks: int, block_tokens: int) -> int:
        """Return the number of blocks to grant beyond the requested `count`, so that the request asks less often.

        `spare_blocks`: this request's equal share of the free blocks beyond `Grants.kept_free_blocks`. May be negative.
        No block is evicted and no request preempted for them. They at most double the blocks of a request, and never
        exceed the need of its longest output. A landing request gets none: its copy is planned already.
        """
        if spare_blocks <= 0 or self.landing:
            return 0
        most_blocks = -(-(self.request.prompt_tokens + self.request.output_tokens_max) // block_tokens)
        has_blocks = len(self.table) + count
        return max(0, min(spare_blocks, has_blocks, most_blocks - has_blocks))


def granted(holding: Holding, host: HostId, block_tokens: int, *, cached_blocks: int = 0) -> ToWorker | LandingGranted:
    """Return the message that grants the blocks to the worker, or to the transfer that lands in them.

    `cached_blocks`: as in `BlocksGranted`.
    """
    request_id, table = holding.request.id, holding.table
    if holding.landing:
        done_blocks = max(holding.behind, holding.computed_tokens // block_tokens)
        return LandingGranted(host, request_id, holding.attempt, table, done_blocks)
    assert holding.user is not None, f"{request_id} is granted blocks while no worker runs it"
    assert not holding.reading, f"{request_id} is granted blocks while they are read into"
    return ToWorker(holding.user, BlocksGranted(request_id, holding.attempt, table, cached_blocks))


def idle_younger(holdings: Iterable[Holding], than: Holding) -> list[Holding]:
    """Return younger holdings that no worker or transfer touches, the youngest first."""
    idle = [held for held in holdings if held.table and not held.is_touched and held.age > than.age]
    return sorted(idle, key=lambda held: held.age, reverse=True)


def less_urgent(holdings: Iterable[Holding], priority: int) -> list[Holding]:
    """Return the holdings of less urgent classes that can be preempted or are being preempted, the youngest first."""

    def is_less_urgent(held: Holding) -> bool:
        service = held.request.service
        return (0 if service is None else service.priority) > priority

    found = [held for held in holdings if is_less_urgent(held) and held.table and not (held.landing or held.leases)]
    return sorted((held for held in found if not held.released), key=lambda held: held.age, reverse=True)


def may_preempt(held: Holding) -> bool:
    """Return whether a holding can be preempted: it has blocks, is not giving them back, and no transfer uses it."""
    return bool(held.table) and not (held.preempting or held.released or held.landing or held.leases)


def youngest_to_preempt(holdings: Collection[Holding], growing: Holding) -> Holding | None:
    """Return the youngest holding that can be preempted, or None.

    Holdings that give back their blocks already, or that a transfer or tier read uses, cannot be preempted. A growing
    request does not preempt itself while another one is read back: it waits for the end of that read.
    """
    victim = max(filter(may_preempt, holdings), key=lambda held: held.age, default=None)
    return None if victim is growing and any(held.reading for held in holdings) else victim
