"""Transfers into one host: request blocks to land in, lease the source's blocks, copy, and notify both pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.copies import CopyBlocks, LandingEnded, LandingGranted, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.messages import ReleaseBlocks, StartDecode
from baton.core.tier_messages import LoadWanted
from baton.core.types import BlockHash, BlockId, HostId, RequestId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import prefix_names, tokens_at
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.transfer import Over, Start, Steps, Transfer, TransferTable
from baton.decide.kv.host_pool import HostPool


@dataclass(slots=True, kw_only=True)
class Landings:
    """Runs each transfer from the request for blocks to its end."""

    table: TransferTable
    pools: Mapping[HostId, HostPool]
    homes: Mapping[RequestId, set[HostId]]
    links: LinkEstimates
    layers: LayerTransfers

    def fetch(
        self, start: Start, *, source: HostId, target: HostId, tokens: int, names: tuple[BlockHash, ...]
    ) -> Steps[None]:
        """Request blocks to land in. The request starts when they are filled.

        `tokens`: number of leading tokens to transfer. `names`: hashes of their full blocks at the target. `source` is
        the target itself for a read from its tiers.
        """
        transfer = Transfer(
            number=self.table.next_number(),
            request=start.request,
            start=start,
            source=source,
            target=target,
            tokens=tokens,
            names=names,
        )
        self.table.add(transfer)
        pool = self.pools[target]
        blocks, first = -(-tokens // pool.block_tokens), pool.behind(tokens)
        yield ToPool(target, LandingWanted(start.request, start.attempt, start.worker, blocks, names, first))

    def granted(self, granted: LandingGranted, now_s: float) -> Steps[Over | None]:
        """Lease and copy the source's blocks, or read the tiers. A transfer without missing blocks ends at once."""
        request_id, target = granted.request_id, granted.host
        transfer = self.table.find_landing(request_id, target)
        assert transfer is not None, f"{request_id} is granted blocks to land in, and no transfer waits for them"
        held, wanted = granted.cached_blocks, len(transfer.names)
        if transfer.chunk is not None:
            yield from self.layers.land(transfer, granted.block_table, held, now_s)
            return None
        transfer.cached_tokens = held * self.pools[target].block_tokens
        if transfer.source == target:
            transfer.state = "copying"
            write = granted.block_table[held:wanted]
            yield ToPool(target, LoadWanted(request_id, transfer.number, transfer.names[held:wanted], write))
            return None
        if transfer.start is not None:
            transfer.tokens = min(transfer.tokens, tokens_at(self.pools, transfer.source, transfer.start))
        if transfer.tokens:
            self.homes[request_id].add(transfer.source)  # the host may have been lost and joined again meanwhile
            prefix = prefix_names(self.pools[transfer.source], transfer.request)
            yield ToPool(transfer.source, LeaseWanted(transfer.request, prefix))
        return (yield from self._copy(transfer, granted, now_s))

    def _copy(self, transfer: Transfer, granted: LandingGranted, now_s: float) -> Steps[Over | None]:
        """Copy the blocks that the target lacks."""
        request_id, read = transfer.request.id, tuple[BlockId, ...]()
        transfer.state = "copying"
        source, target = self.pools.get(transfer.source), self.pools[transfer.target]
        if transfer.tokens and source is not None:
            read, computed_tokens = source.table(request_id)
            transfer.tokens, transfer.is_leasing = min(transfer.tokens, computed_tokens), True
            if source.held_from_tokens(request_id) > transfer.cached_tokens:
                transfer.tokens, transfer.is_too_late = 0, True
        if source is None or transfer.tokens <= transfer.cached_tokens:
            return (yield from self.ended(transfer.number, request_id, blocks=0, landed=True))
        copy = CopyBlocks(
            request_id=request_id,
            number=transfer.number,
            source=transfer.source,
            target=transfer.target,
            read=read[transfer.cached_tokens // source.block_tokens : -(-transfer.tokens // source.block_tokens)],
            write=granted.block_table[granted.cached_blocks : -(-transfer.tokens // target.block_tokens)],
            first_token=transfer.cached_tokens,
            tokens=transfer.tokens - transfer.cached_tokens,
        )
        if not copy.read:
            return (yield from self.ended(transfer.number, request_id, blocks=0, landed=False))
        self.links.copy_begins(copy, now_s)
        yield copy
        return None

    def ended(self, number: int, request_id: RequestId, *, blocks: int | None, landed: bool) -> Steps[Over]:
        """Notify both pools of the end of a transfer. `blocks`: leading blocks that were written; None: all."""
        transfer, is_awaited = self.table.end(number, request_id)
        landed = landed and not transfer.is_too_late
        tokens = transfer.cached_tokens
        if transfer.target in self.pools:
            block_tokens = self.pools[transfer.target].block_tokens
            there = transfer.tokens if blocks is None else tokens + blocks * block_tokens
            tokens = max(min(transfer.tokens, there), tokens)
        transfer.state = "landed" if landed else "failed"
        is_whole = tokens >= transfer.tokens if transfer.is_read_ahead else landed
        yield from self._tell_ends(transfer, tokens)
        return Over(transfer=transfer, is_awaited=is_awaited, is_whole=is_whole)

    def chunk_over(self, transfer: Transfer) -> Steps[Over]:
        """Notify both pools of the end of a chunk. A recomputed prompt must still compute its last token."""
        landed = transfer.chunk is not None and not transfer.chunk.has_failed
        _, is_awaited = self.table.end(transfer.number, transfer.request.id)
        transfer.state = "landed" if landed else "failed"
        tokens = transfer.cached_tokens
        if landed and isinstance(transfer.start, StartDecode):
            tokens = transfer.tokens
        elif landed and transfer.target in self.pools:
            block_tokens = self.pools[transfer.target].block_tokens
            tokens = (transfer.request.prompt_tokens - 1) // block_tokens * block_tokens
        yield from self._tell_ends(transfer, max(tokens, transfer.cached_tokens))
        return Over(transfer=transfer, is_awaited=is_awaited, is_whole=landed)

    def _tell_ends(self, transfer: Transfer, tokens: int) -> Steps[None]:
        """End the lease and the landing. `tokens`: leading tokens whose KV is at the target."""
        request_id = transfer.request.id
        if transfer.source in self.pools and transfer.is_leasing:
            yield ToPool(transfer.source, LeaseEnded(request_id))
        if transfer.target in self.pools:
            names = transfer.names[: tokens // self.pools[transfer.target].block_tokens]
            yield ToPool(transfer.target, LandingEnded(request_id, tokens, names))
            if transfer.start is None:  # no start waits, so no request holds the blocks: they become cached
                yield ToPool(transfer.target, ReleaseBlocks(request_id))
