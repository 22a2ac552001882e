"""Reads from tiers if they are cheaper than a recompute: for starts, and for preempted requests (swap-in)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.messages import StartPrefill
from baton.core.ports import CostModel
from baton.core.tier_messages import BlocksKept, LoadBlocks, LoadEnded, ReadBack, ReadBackWanted, StoreBlocks, TierNews
from baton.core.types import BlockHash, HostId, Request, TierHit, WorkerId, WorkerView
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import prefix_names, tokens_at
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.transfer import Start, Steps
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.preemption import read_back_tokens
from baton.decide.policy.prefix import best_prefix


@dataclass(slots=True, kw_only=True)
class TierReads:
    """Decides how much KV is read from tiers, and tracks their writes and reads."""

    cost: CostModel
    pools: Mapping[HostId, HostPool]
    workers: Mapping[WorkerId, WorkerView]
    links: LinkEstimates
    _writes: dict[tuple[HostId, int], str] = field(default_factory=dict[tuple[HostId, int], str])
    """Tiers of the writes under way, by host and number. Bounded by the pools."""

    def hits(self, request: Request) -> dict[HostId, tuple[TierHit, ...]]:
        """Return, by host, the longer prefixes of a prompt that reads from its tiers can provide."""
        hits = {host: _tier_hits(pool, request) for host, pool in self.pools.items() if pool.tiers is not None}
        return {host: found for host, found in hits.items() if found} if hits else hits

    def worth_reading(self, start: Start, *, target: HostId, source: HostId | None) -> int:
        """Return how many leading tokens of a request to read from the tiers of its host. 0: a read is not worth it.

        For the first attempt of a prompt, the coordinator has decided at the arrival. Any other start reads if that is
        faster than to recompute the KV that neither the arena nor the other host, `source`, has.
        """
        pool, request = self.pools[target], start.request
        if pool.tiers is None or request.sampling.prompt_logprobs:
            return 0
        tokens = max(tokens_at(self.pools, target, start), tokens_at(self.pools, source, start))
        if isinstance(start, StartPrefill) and start.attempt == 1:
            wanted_tokens = min(start.read_tokens, max((hit.tokens for hit in _tier_hits(pool, request)), default=0))
        else:
            cost = self.cost.on(self._kind(start.worker))
            wanted_tokens = best_prefix(request, tokens, _tier_hits(pool, request), cost).tokens
        if wanted_tokens <= tokens:
            if source is None or source == target:
                pool.tiers.decline(prefix_names(pool, request))
            return 0
        return wanted_tokens

    def read_back(self, wanted: ReadBackWanted, number: int) -> ToPool:
        """Decide how much KV of a preempted request to swap in, by the tiers' contents and predicted times."""
        pool, cost = self.pools[wanted.host], self.cost.on(self._kind(wanted.worker))
        assert pool.tiers is not None, f"{wanted.host} wants to read {wanted.request_id} back, and has no tiers"
        held_tokens = pool.tiers.held_blocks(wanted.hashes) * pool.block_tokens
        full_tokens, hits = len(wanted.hashes) * pool.block_tokens, _hits(pool, wanted.hashes)
        tokens = read_back_tokens(pool.tiers.preemption, full_tokens, held_tokens, hits, cost, beside=wanted.beside)
        if hits and tokens <= held_tokens and pool.tiers.preemption == "cheaper":
            pool.tiers.decline(wanted.hashes)
        return ToPool(wanted.host, ReadBack(wanted.request_id, number, tokens))

    def begins(self, command: StoreBlocks | LoadBlocks, now_s: float) -> None:
        """Record the start of a write or a read."""
        self.links.tier_work_begins(command, now_s)
        if isinstance(command, StoreBlocks):
            self._writes[command.host, command.number] = command.tier

    def note(self, host: HostId, news: TierNews, now_s: float) -> Steps[str | None]:
        """Pass an event of a tier to its pool. Return the name of a tier that has new blocks, or None."""
        if isinstance(news, BlocksKept | LoadEnded):
            self.links.tier_work_ends(host, news, now_s)
        tier = self._writes.pop((host, news.number), None) if isinstance(news, BlocksKept) else None
        if host not in self.pools:
            return None
        yield ToPool(host, news)
        return tier

    def lose_host(self, host: HostId) -> None:
        """Forget the writes of a lost host."""
        self._writes = {place: tier for place, tier in self._writes.items() if place[0] != host}

    def _kind(self, worker: WorkerId) -> str:
        view = self.workers.get(worker)
        return view.kind if view is not None else ""


def _tier_hits(pool: HostPool, request: Request) -> tuple[TierHit, ...]:
    return () if request.sampling.prompt_logprobs else _hits(pool, prefix_names(pool, request))


def _hits(pool: HostPool, hashes: Sequence[BlockHash]) -> tuple[TierHit, ...]:
    reached = pool.tiers.reach(hashes) if pool.tiers is not None else ()
    return tuple(TierHit(reach.blocks * pool.block_tokens, reach.load_s) for reach in reached)
