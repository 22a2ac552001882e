"""Copies the end of a prompt layer by layer while it is computed: after its step only the last layers remain.

A block is contiguous over all layers, so its KV is copied in pieces. It counts at the target when all layers of all its
tokens are there and the worker has reported the end of its step. Until then the target keeps the blocks for a landing;
after a failure they are given back, and no copied layer counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks, CopyEnded, LandingWanted, LayersDone, LayerSpan
from baton.core.messages import PrefillFinished
from baton.core.types import BlockId, HostId, RequestId, WorkerId
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.transfer import Chunk, ChunkOver, Leased, SendMore, Stream, Transfer, TransferTable
from baton.decide.kv.hashing import names_of
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout


@dataclass(slots=True, kw_only=True)
class LayerTransfers:
    """The chunks that are copied by layer: at most one per streamed request, with one copy per group of layers."""

    table: TransferTable
    pools: Mapping[HostId, HostPool]
    links: LinkEstimates
    layouts: dict[HostId, KVLayout] = field(default_factory=dict[HostId, KVLayout])
    """Layout of KV on each host. Layers are cut only where both hosts have the same layout, without ranks."""
    _active: dict[RequestId, Transfer] = field(default_factory=dict[RequestId, Transfer])
    _copies: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    """Transfers by the numbers of their copies."""

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    def groups(self, host: HostId, wanted: int) -> int:
        """Return in how many groups of layers a worker of this host reports progress. 1: it does not."""
        layout = self.layouts.get(host)
        return min(wanted, layout.layers) if layout is not None and layout.ranks == 1 else 1

    # ---- events of workers

    def layers_done(self, host: HostId, done: LayersDone, now_s: float) -> list[CopyBlocks | SendMore]:
        """Copy the layers that a step has finished, for its one request. A late event changes nothing."""
        ((request_id, attempt),) = done.requests
        stream = self.table.streams.get(request_id)
        if stream is None or (stream.attempt, stream.source) != (attempt, host) or not self._can_cut(stream):
            return []
        if not self.pools[host].is_computing(request_id, attempt, done.worker):
            return []
        if stream.chunk is None:
            stream.chunk = Chunk(worker=done.worker)
        stream.chunk.layers_done = max(stream.chunk.layers_done, done.layers)
        if stream.transfer is None:
            return [SendMore(stream)]
        return [*self._copy_done(stream.transfer, now_s)] if stream.transfer.chunk is not None else []

    def computed(self, host: HostId, event: PrefillFinished, now_s: float) -> list[CopyBlocks]:
        """Copy the last layers: the step is over. The pool has to hear of that afterwards."""
        transfer = self._active.get(event.request_id)
        if transfer is None or transfer.chunk is None or transfer.source != host:
            return []
        if not self.pools[host].is_computing(event.request_id, event.attempt, event.worker):
            return []
        transfer.chunk.is_computed = True
        transfer.chunk.layers_done = self.layouts[host].layers
        return self._copy_done(transfer, now_s)

    def call_off(self, request_id: RequestId) -> list[ChunkOver]:
        """Give up a chunk that is not computed to its end: no copied layer of it counts."""
        transfer = self._active.get(request_id)
        if transfer is None or transfer.chunk is None or transfer.chunk.is_computed:
            return []
        transfer.chunk.has_failed = True
        return self._settle(transfer)

    def lose(self, lost: WorkerId | HostId) -> list[ChunkOver]:
        """Give up the chunks of a lost worker or host."""
        return [
            over
            for transfer in list(self._active.values())
            if transfer.chunk is not None and lost in (transfer.chunk.worker, transfer.source, transfer.target)
            for over in self.call_off(transfer.request.id)
        ]

    # ---- blocks to land in, and copies

    def begin(self, stream: Stream) -> LandingWanted | None:
        """Ask for blocks for the whole prompt while its end is computed. None: it is not, or has too few blocks yet."""
        request, chunk, source = stream.request, stream.chunk, self.pools[stream.source]
        if chunk is None or not source.is_computing(request.id, stream.attempt, chunk.worker):
            return None
        blocks = -(-request.prompt_tokens // source.block_tokens)
        if len(source.table(request.id)[0]) < blocks:
            return None
        names = names_of(request.block_hashes, source.block_runs)
        stream.sent_tokens = request.prompt_tokens
        stream.transfer = Transfer(
            number=self.table.next_number(),
            request=request,
            source=stream.source,
            target=stream.target,
            tokens=request.prompt_tokens,
            names=names,
            chunk=chunk,
        )
        self.table.add(stream.transfer)
        return LandingWanted(request, stream.attempt, None, blocks, names)

    def leased(self, leased: Leased, now_s: float) -> list[CopyBlocks]:
        """Copy the blocks that are sealed, and the layers that are done of the rest."""
        transfer, source = leased.transfer, self.pools[leased.transfer.source]
        chunk, request = transfer.chunk, transfer.request
        assert chunk is not None, f"the transfer of {request.id} has no chunk"
        transfer.is_leasing, transfer.state = True, "copying"
        transfer.cached_tokens = leased.cached_blocks * source.block_tokens
        table, sealed_tokens = source.table(request.id)
        held, end = leased.cached_blocks, len(leased.write)
        sealed = max(held, min(sealed_tokens // source.block_tokens, end))
        chunk.read, chunk.write = table[sealed:end], leased.write[sealed:end]
        chunk.first_token = sealed * source.block_tokens
        copies: list[CopyBlocks] = []
        if sealed > held:
            tokens = range(transfer.cached_tokens, chunk.first_token)
            copies.append(self._copy(transfer, (table[held:sealed], leased.write[held:sealed]), tokens, None, now_s))
        return [*copies, *self._copy_done(transfer, now_s)]

    def activate(self, transfer: Transfer) -> None:
        """Note that the target has granted blocks for a chunk."""
        self._active[transfer.request.id] = transfer

    def copy_ended(self, end: CopyEnded) -> list[ChunkOver] | None:
        """Note the end of a chunk's copy. None: the copy is of no chunk."""
        transfer = self._copies.pop(end.number, None)
        if transfer is None:
            return None
        chunk = transfer.chunk
        assert chunk is not None, f"the transfer of {end.request_id} has no chunk"
        chunk.copies -= 1
        chunk.has_failed = chunk.has_failed or not end.landed
        return self._settle(transfer)

    def settle(self, request_id: RequestId) -> list[ChunkOver]:
        """End a chunk that has landed already: the worker that goes on with the request is known now."""
        transfer = self._active.get(request_id)
        return [] if transfer is None else self._settle(transfer)

    def _can_cut(self, stream: Stream) -> bool:
        """Tell whether layers can be cut. Behind a window, blocks may be released while they are computed."""
        source, target = self.layouts.get(stream.source), self.layouts.get(stream.target)
        if source is None or source != target or stream.report or self.pools[stream.source].window is not None:
            return False
        return self.groups(stream.source, 2) > 1

    def _copy_done(self, transfer: Transfer, now_s: float) -> list[CopyBlocks]:
        """Copy the layers that are computed and not sent."""
        chunk, layers = transfer.chunk, self.layouts[transfer.source].layers
        assert chunk is not None, f"the transfer of {transfer.request.id} has no chunk"
        if chunk.has_failed or transfer.state != "copying" or chunk.layers_done == chunk.layers_sent:
            return []
        span = LayerSpan(chunk.layers_sent, chunk.layers_done, layers)
        chunk.layers_sent = chunk.layers_done
        if not chunk.read:
            return []
        tokens = range(chunk.first_token, transfer.tokens)
        cut = None if span.end - span.first == layers else span
        return [self._copy(transfer, (chunk.read, chunk.write), tokens, cut, now_s)]

    def _copy(
        self,
        transfer: Transfer,
        blocks: tuple[tuple[BlockId, ...], tuple[BlockId, ...]],
        tokens: range,
        layers: LayerSpan | None,
        now_s: float,
    ) -> CopyBlocks:
        """Make a copy. `blocks`: to read and to write."""
        copy = CopyBlocks(
            request_id=transfer.request.id,
            number=self.table.next_number(),
            source=transfer.source,
            target=transfer.target,
            read=blocks[0],
            write=blocks[1],
            first_token=tokens.start,
            tokens=len(tokens),
            layers=layers,
        )
        assert transfer.chunk is not None, f"the transfer of {transfer.request.id} has no chunk"
        transfer.chunk.copies += 1
        self._copies[copy.number] = transfer
        self.links.copy_begins(copy, now_s)
        return copy

    def _settle(self, transfer: Transfer) -> list[ChunkOver]:
        """End a chunk without copies under way that is computed or has failed."""
        chunk = transfer.chunk
        if chunk is None or chunk.copies or not (chunk.has_failed or chunk.is_computed):
            return []
        if self._active.get(transfer.request.id) is transfer:
            del self._active[transfer.request.id]
        return [ChunkOver(transfer, not chunk.has_failed)]
