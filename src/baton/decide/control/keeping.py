"""Has blocks written to the tiers below an arena, and read from them where that is cheaper than computing them.

What is read is a prompt's KV, before the request starts, or that of a request that was preempted and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.keeping import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    ReadBack,
    ReadBackWanted,
    StoreBlocks,
    TierOpened,
    TierRests,
    TierShrunk,
)
from baton.core.messages import PoolEvent, StartPrefill
from baton.core.ports import CostModel
from baton.core.types import BlockHash, HostId, Request, TierHit, TokenBytes, WorkerId
from baton.decide.control.crossings import Crossings, prefix_names
from baton.decide.control.handoffs import Start
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.preemption import read_back_tokens
from baton.decide.policy.prefix import best_prefix


class Surveyor(Protocol):
    """Measures what tiers take. See `Survey`."""

    def begun(self, command: StoreBlocks | LoadBlocks) -> None: ...

    def ended(self, command: StoreBlocks | LoadBlocks, *, landed: bool) -> None: ...


class Keeper(Protocol):
    """Moves bytes between arenas and stores. See `Outside.keep`."""

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None: ...


@dataclass(slots=True, kw_only=True)
class Keeping:
    """A tier is one more source of a request's KV: what is read lands as what comes from another host."""

    cost: CostModel
    crossings: Crossings
    tell_pool: Callable[[HostId, PoolEvent], None]
    outside: Keeper
    surveyor: Surveyor
    written: Callable[[str], None]
    """Told of a tier that may have more than before, as its book says by now."""
    at: Callable[[float], None]
    """Notes what time it is."""
    kinds: dict[WorkerId, str] = field(default_factory=dict[WorkerId, str])
    """Of every worker, its hardware."""

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks | ReadBackWanted) -> None:
        """Pass on what a pool wants of its tiers. A read of nothing is over at once."""
        if isinstance(command, ReadBackWanted):
            self._read_back(command)
            return
        if isinstance(command, LoadBlocks) and not command.hashes:
            self._end_read(command, LoadEnded(command.request_id, command.number, ()))
            return
        if not isinstance(command, DropBlocks):
            self.surveyor.begun(command)
        self.outside.keep(command)

    def reach(self, request: Request) -> dict[HostId, tuple[TierHit, ...]]:
        """Say what the tiers of every host can add to what its arena holds of a prompt."""
        pools = self.crossings.pools
        hits = {host: _tier_hits(pool, request) for host, pool in pools.items() if pool.tiers is not None}
        return {host: found for host, found in hits.items() if found} if hits else hits

    def read(self, start: Start, tokens_so_far: TokenBytes, *, target: HostId, source: HostId | None) -> bool:
        """Let a request start with what the tiers of its host have of it. False: they have nothing that pays.

        What pays for a prompt, the coordinator has decided from what tiers had when it arrived. A request that goes on
        without its KV, or begins again, is read where that is sooner than computing what neither the arena nor another
        host, `source`, has.
        """
        pool, request = self.crossings.pools[target], start.request
        if pool.tiers is None or request.sampling.prompt_logprobs:
            return False
        tokens = max(self.crossings.tokens_at(target, start), self.crossings.tokens_at(source, start))
        if isinstance(start, StartPrefill) and start.attempt == 1:
            wanted_tokens = min(start.read_tokens, max((hit.tokens for hit in _tier_hits(pool, request)), default=0))
        else:
            cost = self.cost.on(self.kinds.get(start.worker, ""))
            wanted_tokens = best_prefix(request, tokens, _tier_hits(pool, request), cost).tokens
        if wanted_tokens <= tokens:
            if source is None or source == target:
                pool.tiers.decline(prefix_names(pool, request))
            return False
        self.crossings.fetch(start, tokens_so_far, source=target, target=target, tokens=wanted_tokens)
        return True

    def _read_back(self, wish: ReadBackWanted) -> None:
        """Decide how much of a preempted request is read, from what its tiers have and are believed to take now."""
        pool, cost = self.crossings.pools[wish.host], self.cost.on(self.kinds.get(wish.worker, ""))
        assert pool.tiers is not None, f"{wish.host} wants to read {wish.request_id} back, and has no tiers"
        held_tokens = pool.tiers.held_blocks(wish.hashes) * pool.block_tokens
        full_tokens, hits = len(wish.hashes) * pool.block_tokens, _hits(pool, wish.hashes)
        tokens = read_back_tokens(pool.tiers.preemption, full_tokens, held_tokens, hits, cost, beside=wish.beside)
        if hits and tokens <= held_tokens and pool.tiers.preemption == "cheaper":
            pool.tiers.decline(wish.hashes)
        self.tell_pool(wish.host, ReadBack(wish.request_id, self.crossings.handoffs.next_number(), tokens))

    # ---- what stores answer

    def resting(self, host: HostId) -> tuple[str, ...]:
        """Name the tiers whose stores this host leaves alone now."""
        pool = self.crossings.pools.get(host)
        return tuple(sorted(pool.tiers.resting)) if pool is not None and pool.tiers is not None else ()

    def heard(self, host: HostId, news: TierOpened | TierRests | TierShrunk, now_s: float) -> None:
        """A host's tier has told something that nobody waits for."""
        self.at(now_s)
        if host in self.crossings.pools:
            self.tell_pool(host, news)

    def kept(self, store: StoreBlocks, kept: Sequence[bool], now_s: float) -> None:
        """A write is over: nothing reads its blocks any more. `kept`: of each, whether the tier has it now."""
        self.at(now_s)
        self.surveyor.ended(store, landed=any(kept))
        if store.host in self.crossings.pools:
            self.tell_pool(store.host, BlocksKept(store.number, tuple(kept)))
            self.written(store.tier)

    def loaded(self, load: LoadBlocks, end: LoadEnded, now_s: float) -> None:
        """A read is over: nothing writes its blocks any more."""
        self.at(now_s)
        self.surveyor.ended(load, landed=any(end.whole))
        self._end_read(load, end)

    def _end_read(self, load: LoadBlocks, end: LoadEnded) -> None:
        if load.host in self.crossings.pools:
            self.tell_pool(load.host, end)
        if not load.back:
            blocks = next((place for place, is_whole in enumerate(end.whole) if not is_whole), len(end.whole))
            self.crossings.ended(load, blocks=blocks)


def _tier_hits(pool: HostPool, request: Request) -> tuple[TierHit, ...]:
    return () if request.sampling.prompt_logprobs else _hits(pool, prefix_names(pool, request))


def _hits(pool: HostPool, hashes: Sequence[BlockHash]) -> tuple[TierHit, ...]:
    reached = pool.tiers.reach(hashes) if pool.tiers is not None else ()
    return tuple(TierHit(reach.blocks * pool.block_tokens, reach.load_s) for reach in reached)
