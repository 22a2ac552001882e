"""Copies the end of a prompt layer by layer while it is computed: after its step only the last layers remain.

A block is contiguous over all layers, so its KV is copied in pieces. It counts at the target when all layers of all its
tokens are there and the worker has reported the end of its step. Until then the target keeps the blocks for a landing;
after a failure they are given back, and no copied layer counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks, CopyEnded, LandingWanted, LayersDone, LayerSpan, LeaseWanted
from baton.core.messages import PrefillFinished
from baton.core.types import BlockId, HostId, RequestId, WorkerId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.transfer import Chunk, Steps, Stream, Transfer, TransferTable
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
    copies: dict[int, Transfer] = field(default_factory=dict[int, Transfer])
    """Transfers by the numbers of their copies under way."""
    _active: dict[RequestId, Transfer] = field(default_factory=dict[RequestId, Transfer])

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    def groups(self, host: HostId, wanted: int) -> int:
        """Return the number of layer groups after which a worker of this host reports progress. 1: no reports."""
        layout = self.layouts.get(host)
        return min(wanted, layout.layers) if layout is not None and layout.ranks == 1 else 1

    # ---- events of workers

    def progress(self, host: HostId, done: LayersDone, request: tuple[RequestId, int]) -> Stream | None:
        """Record the finished layers of a request and attempt. Return its stream, or None for a late event."""
        stream = self.table.streams.get(request[0])
        if stream is None or (stream.attempt, stream.source) != (request[1], host) or not self._can_cut(stream):
            return None  # a late event, or a stream whose layers cannot be cut
        if not self.pools[host].is_computing(*request, done.worker):
            return None
        stream.chunk = stream.chunk or Chunk(worker=done.worker)
        stream.chunk.layers_done = max(stream.chunk.layers_done, done.layers)
        return stream

    def computed(self, host: HostId, event: PrefillFinished, now_s: float) -> Steps[None]:
        """Copy the last layers after the end of the step. Must be called before the pool gets the event."""
        transfer = self._active.get(event.request_id)
        if transfer is None or transfer.chunk is None or transfer.source != host:
            return
        if self.pools[host].is_computing(event.request_id, event.attempt, event.worker):
            transfer.chunk.is_computed = True
            transfer.chunk.layers_done = self.layouts[host].layers
            yield from self.copy_done(transfer, now_s)

    def call_off(self, request_id: RequestId) -> Transfer | None:
        """Give up an unfinished chunk: its copied layers are useless. Return its transfer if that has ended."""
        transfer = self._active.get(request_id)
        if transfer is None or transfer.chunk is None or transfer.chunk.is_computed:
            return None
        transfer.chunk.has_failed = True
        return self.settle(request_id)

    def on(self, lost: WorkerId | HostId) -> list[RequestId]:
        """Return the requests whose chunk is computed, read or written on this lost worker or host."""
        return [
            transfer.request.id
            for transfer in self._active.values()
            if transfer.chunk is not None and lost in (transfer.chunk.worker, transfer.source, transfer.target)
        ]

    # ---- blocks to land in, and copies

    def begin(self, stream: Stream) -> LandingWanted | None:
        """Request blocks for the whole prompt while its end is computed. None: the conditions are not met yet."""
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

    def land(self, transfer: Transfer, write: tuple[BlockId, ...], cached_blocks: int, now_s: float) -> Steps[None]:
        """Lease the blocks of a chunk at the source. Copy those that are sealed, and the done layers of the rest."""
        self._active[transfer.request.id] = transfer
        yield ToPool(transfer.source, LeaseWanted(transfer.request, ()))
        source, chunk = self.pools[transfer.source], transfer.chunk
        assert chunk is not None, f"the transfer of {transfer.request.id} has no chunk"
        transfer.is_leasing, transfer.state = True, "copying"
        transfer.cached_tokens = cached_blocks * source.block_tokens
        table, sealed_tokens = source.table(transfer.request.id)
        sealed = max(cached_blocks, min(sealed_tokens // source.block_tokens, len(write)))
        chunk.read, chunk.write = table[sealed : len(write)], write[sealed:]
        chunk.first_token = sealed * source.block_tokens
        if sealed > cached_blocks:
            tokens = range(transfer.cached_tokens, chunk.first_token)
            yield self._copy(transfer, (table[cached_blocks:sealed], write[cached_blocks:sealed]), tokens, None, now_s)
        yield from self.copy_done(transfer, now_s)

    def copy_ended(self, end: CopyEnded) -> Transfer | None:
        """Note the end of a chunk's copy. Return its transfer if that is over."""
        transfer = self.copies.pop(end.number)
        chunk = transfer.chunk
        assert chunk is not None, f"the transfer of {end.request_id} has no chunk"
        chunk.copies -= 1
        chunk.has_failed = chunk.has_failed or not end.landed
        return self._settle(transfer)

    def settle(self, request_id: RequestId) -> Transfer | None:
        """End a chunk without copies under way that is computed or has failed. Return its transfer if it is over."""
        transfer = self._active.get(request_id)
        return None if transfer is None else self._settle(transfer)

    def _can_cut(self, stream: Stream) -> bool:
        """Return whether the stream's KV can be copied by layer. Not with a window: it releases blocks in the step."""
        source, target = self.layouts.get(stream.source), self.layouts.get(stream.target)
        if source is None or source != target or stream.report or self.pools[stream.source].window is not None:
            return False
        return self.groups(stream.source, 2) > 1

    def copy_done(self, transfer: Transfer, now_s: float) -> Steps[None]:
        """Copy the layers that are computed and not sent."""
        chunk, layers = transfer.chunk, self.layouts[transfer.source].layers
        assert chunk is not None, f"the transfer of {transfer.request.id} has no chunk"
        if chunk.has_failed or transfer.state != "copying" or chunk.layers_done == chunk.layers_sent:
            return
        span = LayerSpan(chunk.layers_sent, chunk.layers_done, layers)
        chunk.layers_sent = chunk.layers_done
        if chunk.read:
            tokens = range(chunk.first_token, transfer.tokens)
            cut = None if span.end - span.first == layers else span
            yield self._copy(transfer, (chunk.read, chunk.write), tokens, cut, now_s)

    def _copy(
        self,
        transfer: Transfer,
        blocks: tuple[tuple[BlockId, ...], tuple[BlockId, ...]],
        tokens: range,
        layers: LayerSpan | None,
        now_s: float,
    ) -> CopyBlocks:
        """Return the command of a copy, and record it. `blocks`: blocks to read, blocks to write."""
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
        self.copies[copy.number] = transfer
        self.links.copy_begins(copy, now_s)
        return copy

    def _settle(self, transfer: Transfer) -> Transfer | None:
        chunk = transfer.chunk
        if chunk is None or chunk.copies or not (chunk.has_failed or chunk.is_computed):
            return None
        if self._active.get(transfer.request.id) is transfer:
            del self._active[transfer.request.id]
        return transfer
