"""The hosts of a cluster: their pools, KV layouts and workers, and how much of a request's KV each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.messages import StartDecode, StartPrefill
from baton.core.types import BlockHash, HostId, Request, RequestId, TierHit, WorkerId, WorkerView
from baton.decide.control.cluster_messages import HostAdded
from baton.decide.control.transfer import Start
from baton.decide.kv.blocks import EvictionOrder
from baton.decide.kv.hashing import hashes_per_block, prefix_of
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.tier import Tier
from baton.decide.kv.window import ONE_HASH_A_BLOCK, PromptRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """Rules for the pools of all hosts."""

    eviction: Callable[[], EvictionOrder]
    """Makes an eviction order for an arena or a tier."""
    prompts: PromptRules = ONE_HASH_A_BLOCK
    handover_bytes: int = 256 * 1024 * 1024
    """Maximum size of the cached prefixes that a leaving host hands over, and that a joining one gets. 0: none."""


@dataclass(slots=True)
class LostBlocks:
    """Hashes of the blocks that live requests had sealed on lost hosts. Tiers may still have such blocks."""

    _hashes: dict[RequestId, tuple[tuple[BlockHash, ...], int]] = field(
        default_factory=dict[RequestId, tuple[tuple[BlockHash, ...], int]]
    )
    """The hashes of each live request, and the number of hashes per block of the lost host."""

    def note(self, request_id: RequestId, lost: HostPool) -> None:
        """Store a request's sealed hashes of a lost host, unless another lost host had more."""
        sealed, (known, runs) = lost.sealed_hashes(request_id), self._hashes.get(request_id, ((), 1))
        if len(sealed) * lost.block_runs > len(known) * runs:
            self._hashes[request_id] = sealed, lost.block_runs

    def hashes(self, request_id: RequestId, pool: HostPool) -> tuple[BlockHash, ...]:
        """Return the hashes for this pool's block size. Empty if its blocks are no multiples of the lost host's."""
        sealed, runs = self._hashes.get(request_id, ((), 1))
        return hashes_per_block(sealed, pool.block_runs // runs) if pool.block_runs % runs == 0 else ()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._hashes

    def forget(self, request_id: RequestId) -> None:
        """Remove a closed request."""
        self._hashes.pop(request_id, None)


@dataclass(slots=True)
class HostPools:
    """The pools of all hosts. Hosts that share a store share the metadata of its blocks."""

    rules: PoolRules
    pools: dict[HostId, HostPool] = field(default_factory=dict[HostId, HostPool])
    workers: dict[WorkerId, WorkerView] = field(default_factory=dict[WorkerId, WorkerView])
    """Workers that have joined, with their views at that time."""
    layouts: dict[HostId, KVLayout] = field(default_factory=dict[HostId, KVLayout])
    homes: dict[RequestId, set[HostId]] = field(default_factory=dict[RequestId, set[HostId]])
    """Hosts whose pools know each request."""
    lost_blocks: LostBlocks = field(default_factory=LostBlocks)
    leaving: set[HostId] = field(default_factory=set[HostId])
    """Live hosts that leave."""
    _shared: dict[tuple[str, str, int], Tier] = field(default_factory=dict[tuple[str, str, int], Tier])
    """Tiers that hosts share, by name, store and block size. They outlive their hosts: the store keeps its blocks. Live
    hosts and the newest host bound their number."""

    # ---- hosts come and go

    def add(self, added: HostAdded) -> None:
        """Build the pool of a host."""
        block_tokens = added.layout.block_tokens
        self.layouts[added.host] = added.layout
        pool = self.pools[added.host] = HostPool(
            host=added.host,
            blocks_total=added.blocks_total,
            block_tokens=block_tokens,
            eviction=self.rules.eviction,
            tiers=self._tiers(added),
            prompts=self.rules.prompts,
        )
        if added.kept:
            pool.hot_prefixes.restore(added.kept)

    def _tiers(self, added: HostAdded) -> list[Tier]:
        """Return a host's tiers: one object for all hosts that share a store.

        A tier that no live host uses is kept only if the new host has it with the same rules.
        """
        in_use = {tier for pool in self.pools.values() if pool.tiers is not None for tier in pool.tiers.tiers}
        self._shared = {key: tier for key, tier in self._shared.items() if tier in in_use or tier.rules in added.tiers}
        tiers: list[Tier] = []
        for rules in added.tiers:
            key = (rules.name, rules.shared_as, added.layout.block_tokens)
            tier = self._shared.get(key) or Tier(rules, self.rules.eviction)
            if rules.shared_as:
                self._shared[key] = tier
            tiers.append(tier)
        return tiers

    def lose(self, host: HostId) -> None:
        """Remove a lost host with its workers, and end the reads and writes of its tiers."""
        self.layouts.pop(host, None)
        self.leaving.discard(host)
        pool = self.pools.pop(host, None)
        if pool is not None and pool.tiers is not None:
            pool.tiers.abandon()
        for worker in [view.id for view in self.workers.values() if view.host == host]:
            del self.workers[worker]
        for request_id, homes in self.homes.items():
            if host in homes:
                homes.discard(host)
                if pool is not None:
                    self.lost_blocks.note(request_id, pool)

    # ---- the KV of a request

    def tokens_at(self, source: HostId | None, start: Start) -> int:
        """Return the number of the request's leading tokens whose KV the host `source` can provide now."""
        pool = self.pools.get(source) if source is not None else None
        if pool is None:
            return 0
        request = start.request
        if isinstance(start, StartDecode):
            cached = known_hashes(self, pool.host, start) if self._is_cached(start) else ()
            return max(pool.table(request.id)[1], pool.held_tokens(cached))
        if request.sampling.prompt_logprobs:
            return 0  # every prompt token has to be computed
        held_tokens = pool.held_tokens(hashes_per_block(request.block_hashes, pool.block_runs))
        return min(held_tokens, request.prompt_tokens - 1)

    def best_source(self, start: Start, target: HostId) -> HostId:
        """Return the host with the most KV of the request; the target on a tie.

        After the loss of a host or a restart of the server, any host may have the KV among its cached blocks.
        """
        homes = set(self.pools) if self._is_cached(start) else self.homes[start.request.id]
        if homes <= {target}:
            return target
        return max((target, *sorted(homes)), key=lambda host: self.tokens_at(host, start))

    def _is_cached(self, start: Start) -> bool:
        return start.request.id in self.lost_blocks or start.request.resumed_tokens > 0

    def hashes_at(self, source: HostId, target: HostId, request: Request, tokens: int) -> tuple[BlockHash, ...]:
        """Return the hashes of the full blocks that the request's first `tokens` tokens fill at the target.

        The result ends before the first unknown hash. Those of the prompt are known. That of a block of the answer is
        known if a sealed block of the source, or of a lost host, ends at the same token.
        """
        giver, taker = self.pools[source], self.pools[target]
        blocks, sealed = tokens // taker.block_tokens, giver.sealed_hashes(request.id)
        hashes = list(hashes_per_block(request.block_hashes, taker.block_runs)[:blocks])
        hashes = max(hashes, list(self.lost_blocks.hashes(request.id, taker)[:blocks]), key=len)
        if giver.block_runs == taker.block_runs:
            return max(sealed[:blocks], tuple(hashes), key=len)
        while len(hashes) < blocks:
            index, rest = divmod((len(hashes) + 1) * taker.block_runs, giver.block_runs)
            if rest or index > len(sealed):
                break
            hashes.append(sealed[index - 1])
        return tuple(hashes)

    def prefix_hashes(self, host: HostId, request: Request) -> tuple[BlockHash, ...]:
        """Return the hashes of a prompt's shareable full blocks, for this host's block size. See `prefix_of`."""
        pool = self.pools[host]
        return prefix_of(request, block_runs=pool.block_runs, block_tokens=pool.block_tokens)

    def held_blocks(self, host: HostId, hashes: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks in the arena of a host with tiers. 0 for a host without tiers."""
        tiers = self.pools[host].tiers
        return tiers.held_blocks(hashes) if tiers is not None else 0

    def reachable_blocks(self, host: HostId, hashes: Sequence[BlockHash]) -> int:
        """Return how many of the leading blocks a host has in its arena or can read from its tiers."""
        hits = self.tier_hits(host, hashes)
        return hits[-1].tokens // self.pools[host].block_tokens if hits else self.held_blocks(host, hashes)

    def tier_hits(self, host: HostId, hashes: Sequence[BlockHash]) -> tuple[TierHit, ...]:
        """Return the prefixes beyond the arena's that reads from a host's tiers can provide, the shortest first."""
        pool = self.pools[host]
        reached = pool.tiers.reach(hashes) if pool.tiers is not None else ()
        return tuple(TierHit(reach.blocks * pool.block_tokens, reach.load_s) for reach in reached)

    def shared_tier(self, source: HostId, target: HostId) -> Tier | None:
        """Return a tier that both hosts share with the same block size.

        None if the model has an attention window: the source then holds only the end of a long prompt, but reads of
        a remote pool begin at the first block.
        """
        giver, taker = self.pools.get(source), self.pools.get(target)
        if source == target or giver is None or taker is None or giver.tiers is None or taker.tiers is None:
            return None
        return giver.tiers.shared_with(taker.tiers) if giver.window is None else None


def take_home(homes: set[HostId], host: HostId) -> list[HostId]:
    """Leave only this host among the homes of a request. Return the others, which must release its blocks."""
    if homes == {host}:
        return []
    others = sorted(homes - {host})
    homes.difference_update(others)
    return others


def known_hashes(hosts: HostPools, host: HostId, start: Start) -> tuple[BlockHash, ...]:
    """Return the hashes of the blocks that a start can use on this host.

    For a decode whose host was lost, they include the sealed blocks of its answer.
    """
    hashes = hosts.prefix_hashes(host, start.request)
    if isinstance(start, StartPrefill):
        return hashes
    return max(hashes, hosts.lost_blocks.hashes(start.request.id, hosts.pools[host]), key=len)
