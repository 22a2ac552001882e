"""Landings: ask a transfer's target for blocks, fill them, and notify both pools of the end."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.copies import LandingEnded, LandingGranted, LeaseEnded, LeaseWanted
from baton.core.messages import ReleaseBlocks
from baton.core.tier_messages import LoadWanted
from baton.core.types import BlockHash, HostId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools, known_hashes
from baton.decide.control.transfer import Start, Steps, Transfer, TransferTable


@dataclass(frozen=True, slots=True)
class Landings:
    """Begins the transfers that starts of requests wait for. Fills and ends those that are not copied by layer."""

    hosts: HostPools
    table: TransferTable

    def begin(
        self, start: Start, source: HostId, target: HostId, tokens: int, hashes: tuple[BlockHash, ...] | None = None
    ) -> Steps[None]:
        """Begin the transfer of a request's leading `tokens`, for which its start waits.

        `source`: the target itself for a read from its tiers. `hashes`: hashes of the full blocks at the target.
        """
        pool = self.hosts.pools[target]
        if hashes is None:
            hashes = self.hosts.hashes_at(source, target, start.request, tokens)
        transfer = self.table.begin(
            start.request, source=source, target=target, tokens=tokens, hashes=hashes, start=start
        )
        yield transfer.ask_for_blocks(start.attempt, pool.block_tokens, pool.behind(tokens))

    def fill(self, transfer: Transfer, granted: LandingGranted) -> Steps[bool]:
        """Lease and copy the source's blocks, or read the tiers. Return False if the target lacks no block."""
        request_id, table, held = granted.request_id, granted.block_table, granted.cached_blocks
        block_tokens, wanted = self.hosts.pools[granted.host].block_tokens, len(transfer.hashes)
        transfer.cached_tokens = held * block_tokens
        if transfer.source == transfer.target:
            load = LoadWanted(request_id, transfer.number, transfer.hashes[held:wanted], table[held:wanted])
            yield ToPool(transfer.target, load)
            return True
        if transfer.start is not None:
            transfer.tokens = min(transfer.tokens, self.hosts.tokens_at(transfer.source, transfer.start))
        if not transfer.tokens or not (yield from self._lease(transfer)):
            return False
        source, tokens = self.hosts.pools[transfer.source], range(transfer.cached_tokens, transfer.tokens)
        read = source.table(request_id)[0][tokens.start // source.block_tokens : -(-tokens.stop // source.block_tokens)]
        yield transfer.copy(transfer.number, tokens, read, table[held : -(-tokens.stop // block_tokens)])
        return True

    def _lease(self, transfer: Transfer) -> Steps[bool]:
        """Lease the source's blocks. Return whether it has tokens that the target lacks."""
        request, source, start = transfer.request, transfer.source, transfer.start
        self.hosts.homes[request.id].add(source)  # the host may have been lost and joined again meanwhile
        prefix = known_hashes(self.hosts, source, start) if start else self.hosts.prefix_hashes(source, request)
        yield ToPool(source, LeaseWanted(request, prefix))
        pool = self.hosts.pools[source]
        transfer.tokens, transfer.is_leasing = min(transfer.tokens, pool.table(request.id)[1]), True
        if pool.held_from_tokens(request.id) > transfer.cached_tokens:
            transfer.tokens, transfer.is_too_late = 0, True
        return transfer.tokens > transfer.cached_tokens

    def end(self, transfer: Transfer, tokens: int, *, landed: bool) -> Steps[bool]:
        """End the lease and the landing. Return whether a start waits for the transfer.

        `tokens`: leading tokens whose KV is at the target.
        """
        is_awaited = self.table.end(transfer, landed=landed)
        request_id, source, target = transfer.request.id, transfer.source, transfer.target
        if source in self.hosts.pools and transfer.is_leasing:
            yield ToPool(source, LeaseEnded(request_id))
        if target in self.hosts.pools:
            hashes = transfer.hashes[: tokens // self.hosts.pools[target].block_tokens]
            yield ToPool(target, LandingEnded(request_id, tokens, hashes))
            if transfer.start is None:  # no start waits, so no request holds the blocks: they become cached
                yield ToPool(target, ReleaseBlocks(request_id))
        return is_awaited
