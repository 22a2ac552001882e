"""Copy the hot prefixes of a leaving host to another host, one after the other, up to a bound."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import ReleaseBlocks
from baton.core.types import HostId, Request, RequestId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools
from baton.decide.control.transfer import Steps, Transfer, TransferTable


@dataclass(slots=True)
class PrefixHandover:
    """Copies prefixes between hosts. Each copy has an internal request, which no client has sent."""

    hosts: HostPools
    table: TransferTable
    _left: dict[HostId, list[Request]] = field(default_factory=dict[HostId, list[Request]])
    """Prefixes that are still to be copied, by leaving host: each is the prompt of an internal request."""
    _under_way: set[RequestId] = field(default_factory=set[RequestId])

    def begin(self, source: HostId, now_s: float) -> Steps[None]:
        """Begin to copy the hot prefixes of a host that leaves to the host with the most free blocks.

        Only a host with the same block size can take prefixes by their hashes.
        """
        pool = self.hosts.pools.get(source)
        takers = [
            other
            for name, other in self.hosts.pools.items()
            if name not in self.hosts.leaving and pool is not None and other.block_tokens == pool.block_tokens
        ]
        if pool is None or pool.window is not None or source in self._left or not takers:
            return
        taker = min(takers, key=lambda other: (-other.view().blocks_free, other.host))
        bound = self.hosts.rules.handover_bytes // self.hosts.layouts[source].block_bytes
        prefixes = pool.hot_prefixes.chains(min(bound, taker.view().blocks_free))
        self._left[source] = [
            Request(
                id=RequestId(f"prefix-{self.table.next_number()}"),
                prompt_tokens=len(prefix.hashes) * pool.block_tokens + 1,  # the last token of a prompt is no prefix
                block_hashes=prefix.hashes,
                output_tokens_max=1,
                arrived_at_s=now_s,
                tenant=prefix.tenant,
            )
            for prefix in prefixes
        ]
        yield from self._copy_next(source, taker.host)

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
        """Begin the next copy of a prefix that the target lacks. The loss of either host ends the handover."""
        left, pools = self._left.get(source, []), self.hosts.pools
        while left and source in pools and target in pools:
            request = left.pop(0)
            tokens = request.prompt_tokens - 1
            if pools[target].held_tokens(request.block_hashes) == tokens:
                continue
            self._under_way.add(request.id)
            self.hosts.homes[request.id] = {source, target}
            transfer = Transfer(
                number=self.table.next_number(),
                request=request,
                source=source,
                target=target,
                tokens=tokens,
                hashes=request.block_hashes,
            )
            yield self.table.add(transfer).ask_for_blocks(1, pools[target].block_tokens)
            return
        self._left.pop(source, None)
