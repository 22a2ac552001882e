"""Copy hot prefixes between hosts ahead of demand, one after the other, up to a bound.

They go from a host that leaves, to a host that joins, and from time to time to each host that computes prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import ReleaseBlocks
from baton.core.types import HostId, Request, RequestId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools
from baton.decide.control.transfer import Steps, Transfer, TransferTable
from baton.decide.kv.hashing import hashes_per_block
from baton.decide.kv.host_pool import HostPool

WARM_USES_MIN = 2
"""Minimum number of requests that used a block before it is copied ahead of demand."""
HOT_USES_MIN = 4
"""Minimum number of requests that used a block before it is copied to hosts that stay."""
HOT_S = 30.0
"""Time between such copies, because finding prefixes scans all blocks of an arena."""


@dataclass(slots=True)
class PrefixHandover:
    """Copies prefixes between hosts. Each copy has an internal request, which no client has sent."""

    hosts: HostPools
    table: TransferTable
    _left: dict[tuple[HostId, HostId], list[Request]] = field(
        default_factory=dict[tuple[HostId, HostId], list[Request]]
    )
    """Prefixes that are still to be copied, by source and target: each is the prompt of an internal request."""
    _under_way: set[RequestId] = field(default_factory=set[RequestId])
    _spread_s: float = 0.0
    """Last time of copies to hosts that stay."""

    def begin(self, source: HostId, now_s: float) -> Steps[None]:
        """Begin to copy the hot prefixes of a host that leaves to the host with the most free blocks."""
        takers = self._partners(source)
        if takers:
            taker = min(takers, key=lambda other: (-other.view().blocks_free, other.host))
            yield from self._begin(self.hosts.pools[source], taker, now_s, uses_min=1)

    def warm(self, target: HostId, now_s: float) -> Steps[None]:
        """Begin to copy hot prefixes to a host that joins, from the host with the most cached blocks.

        Only prefixes that several requests have used are copied. Without copies, the first request to each prefix would
        wait for its transfer.
        """
        sources = [other for other in self._partners(target) if other.view().blocks_cached]
        if sources:
            source = min(sources, key=lambda other: (-other.view().blocks_cached, other.host))
            yield from self._begin(source, self.hosts.pools[target], now_s, uses_min=WARM_USES_MIN)

    def spread(self, now_s: float) -> Steps[None]:
        """Begin to copy hot prefixes to hosts that compute prompts, each from the host with the most cached blocks.

        So a request need not choose between a host with its prefix and an idle host, and the loss of one host does not
        lose the prefix. Source: Mooncake (FAST 2025), which replicates hot blocks.
        """
        if now_s - self._spread_s < HOT_S:
            return
        self._spread_s = now_s
        workers = self.hosts.workers.values()
        for target in sorted({worker.host for worker in workers if worker.role != "decode"} - self.hosts.leaving):
            sources = [other for other in self._partners(target) if other.view().blocks_cached]
            if sources:
                source = min(sources, key=lambda other: (-other.view().blocks_cached, other.host))
                yield from self._begin(source, self.hosts.pools[target], now_s, uses_min=HOT_USES_MIN)

    def _partners(self, host: HostId) -> list[HostPool]:
        """Return the other hosts that stay and have the same block size: prefixes are copied by their hashes.

        Empty for a model with an attention window, whose first blocks are released.
        """
        pool = self.hosts.pools.get(host)
        if pool is None or pool.window is not None:
            return []
        others = [other for name, other in self.hosts.pools.items() if name not in self.hosts.leaving | {host}]
        return [other for other in others if other.block_tokens == pool.block_tokens]

    def _begin(self, pool: HostPool, taker: HostPool, now_s: float, *, uses_min: int) -> Steps[None]:
        """Choose the prefixes that the bound and the free blocks of the taker allow, and begin the first copy."""
        pair = pool.host, taker.host
        if pair in self._left:
            return
        bound = self.hosts.rules.handover_bytes // self.hosts.layouts[pool.host].block_bytes
        prefixes = pool.hot_prefixes.chains(min(bound, taker.view().blocks_free), uses_min)
        self._left[pair] = [
            Request(
                id=RequestId(f"prefix-{self.table.next_number()}"),
                prompt_tokens=len(prefix.hashes) * pool.block_tokens + 1,  # the last token of a prompt is no prefix
                # a request has `block_runs` hashes per block, of which only the last is read here
                block_hashes=tuple(each for each in prefix.hashes for _ in range(pool.block_runs)),
                output_tokens_max=1,
                arrived_at_s=now_s,
                tenant=prefix.tenant,
            )
            for prefix in prefixes
        ]
        yield from self._copy_next(*pair)

    def ended(self, transfer: Transfer) -> Steps[bool]:
        """Begin the next copy after one has ended. Return False for a transfer that belongs to a client's request."""
        request_id, source = transfer.request.id, transfer.source
        if request_id not in self._under_way:
            return False
        self._under_way.remove(request_id)
        self.hosts.homes.pop(request_id, None)
        self.hosts.lost_blocks.forget(request_id)
        if source in self.hosts.pools:
            yield ToPool(source, ReleaseBlocks(request_id))
        yield from self._copy_next(source, transfer.target)
        return True

    def _copy_next(self, source: HostId, target: HostId) -> Steps[None]:
        """Begin the next copy of a prefix that the target lacks.

        The loss of either host ends the copies, and so does a target that leaves.
        """
        left, pools = self._left.get((source, target), []), self.hosts.pools
        while left and source in pools and target in pools and target not in self.hosts.leaving:
            request = left.pop(0)
            tokens = request.prompt_tokens - 1
            hashes = hashes_per_block(request.block_hashes, pools[source].block_runs)
            if pools[target].held_tokens(hashes) == tokens:
                continue
            self._under_way.add(request.id)
            self.hosts.homes[request.id] = {source, target}
            transfer = self.table.begin(request, source=source, target=target, tokens=tokens, hashes=hashes)
            yield transfer.ask_for_blocks(1, pools[target].block_tokens)
            return
        self._left.pop((source, target), None)
