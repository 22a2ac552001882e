"""Second copies of running decodes, so that a decode continues without a recompute after its host is lost.

The class of a request sets how often its new blocks are copied. They go into a tier that other hosts share, or else to
another host, where they are cached like any prefix: no request holds them, and they may be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.messages import StartDecode
from baton.core.tier_messages import PutWanted
from baton.core.types import HostId, Request, RequestId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools
from baton.decide.control.transfer import Start, Steps, Transfer, TransferTable


@dataclass(slots=True, kw_only=True)
class _SecondCopy:
    """The second copy of one running request."""

    request: Request
    attempt: int
    source: HostId
    run_tokens: int
    """Minimum number of new tokens per copy."""
    tried_tokens: int = 0
    """Leading tokens whose copy has begun. After a failure, the next copy includes them again."""
    target: HostId | None = None
    """The host that got the last copy. None: there was none, it failed, or the host was lost."""
    transfer: Transfer | None = None
    """The copy to the target that is under way."""


@dataclass(slots=True)
class SecondCopies:
    """Copies the sealed blocks of running decodes: at most one copy per request at a time.

    Models with an attention window get none: their first blocks are released before a copy could be read.
    """

    hosts: HostPools
    table: TransferTable
    _copies: dict[RequestId, _SecondCopy] = field(default_factory=dict[RequestId, _SecondCopy])

    def begin(self, start: Start, host: HostId) -> None:
        """Note that a request starts on a host, if it decodes there and its class wants copies."""
        request, service = start.request, start.request.service
        self._copies.pop(request.id, None)
        decodes = isinstance(start, StartDecode) or start.until == "end"
        if service is None or not service.copy_tokens or not decodes or self.hosts.pools[host].window is not None:
            return
        self._copies[request.id] = _SecondCopy(
            request=request, attempt=start.attempt, source=host, run_tokens=service.copy_tokens
        )

    def close(self, request_id: RequestId) -> None:
        """Forget a closed request. A copy under way ends by itself."""
        self._copies.pop(request_id, None)
        self.hosts.lost_blocks.forget(request_id)

    def lose_host(self, host: HostId) -> None:
        """Forget the requests of a lost host. Copies that were made to it are made again elsewhere."""
        self._copies = {name: copy for name, copy in self._copies.items() if copy.source != host}
        for copy in [copy for copy in self._copies.values() if copy.target == host]:
            copy.target, copy.transfer, copy.tried_tokens = None, None, 0

    def sealed(self, request_id: RequestId) -> Steps[None]:
        """Begin the next copy of a request if enough new tokens are sealed and no copy is under way."""
        copy = self._copies.get(request_id)
        if copy is None or copy.transfer is not None:
            return
        source = self.hosts.pools[copy.source]
        hashes, request = source.sealed_hashes(request_id), copy.request
        tokens = len(hashes) * source.block_tokens
        in_prompt = tokens < request.prompt_tokens // source.block_tokens * source.block_tokens
        if in_prompt or tokens - copy.tried_tokens < copy.run_tokens:
            return
        new = hashes[copy.tried_tokens // source.block_tokens :]
        copy.tried_tokens = tokens
        tier = source.tiers.shared if source.tiers is not None else None
        if tier is not None:
            yield ToPool(copy.source, PutWanted(request_id, None, tier.name, new, len(new)))
            return
        if copy.target is None or copy.target in self.hosts.leaving:
            copy.target = self._choose_target(copy.source)
        if copy.target is not None:
            yield from self._copy(copy, copy.target, tokens)

    def ended(self, transfer: Transfer, *, landed: bool) -> bool:
        """Note the end of a transfer. Return False if it is no second copy.

        After a failure, the next copy goes to the host that has the most room then.
        """
        copy = self._copies.get(transfer.request.id)
        if copy is None or copy.transfer is not transfer:
            return False
        copy.transfer = None
        if not landed:
            copy.target = None
        return True

    def _copy(self, copy: _SecondCopy, target: HostId, tokens: int) -> Steps[None]:
        """Begin the transfer of all sealed blocks that the target lacks."""
        hashes = self.hosts.hashes_at(copy.source, target, copy.request, tokens)
        block_tokens = self.hosts.pools[target].block_tokens
        if not hashes:
            return
        copy.transfer = self.table.begin(
            copy.request, source=copy.source, target=target, tokens=len(hashes) * block_tokens, hashes=hashes
        )
        yield copy.transfer.ask_for_blocks(copy.attempt, block_tokens)

    def _choose_target(self, source: HostId) -> HostId | None:
        """Return the host with workers that has the most free or cached blocks, or None if no other host stays."""
        others = {view.host for view in self.hosts.workers.values()} - self.hosts.leaving - {source}
        views = {host: self.hosts.pools[host].view() for host in others}
        return min(others, key=lambda host: (views[host].blocks_used - views[host].blocks_total, host), default=None)
