"""Streams: copies of a running request's sealed blocks to the host that will probably continue it.

The end of a prompt can be copied layer by layer while it is computed: after its step only the last layers remain. A
block is contiguous over all layers, so its KV is copied in pieces. The target seals the block once it has all layers of
all tokens and the worker has reported the end of its step. Until then the block is reserved for the transfer; after a
failure it is freed, and the copied layers are lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks, CopyEnded, LandingGranted, LayersDone, LayerSpan, LeaseWanted
from baton.core.messages import AheadEnded, PrefillFinished, SendAhead
from baton.core.types import BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.host_pools import HostPools
from baton.decide.control.transfer import ChunkTransfer, Commands, Steps, Transfer, TransferTable
from baton.decide.kv.hashing import hashes_per_block

ROUNDS_MAX = 8
"""Maximum copies before a moving request is stopped. Each one copies the blocks sealed during the one before."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """A running request whose sealed blocks are copied to the host that will probably continue it."""

    request: Request
    attempt: int
    source: HostId
    target: HostId
    run_tokens: int
    """Minimum tokens per copy."""
    report: bool
    """The coordinator waits for `AheadEnded`, and then stops the request to move it."""
    sent_tokens: int = 0
    rounds: int = 0
    transfer: Transfer | None = None
    """The transfer that is under way."""
    worker: WorkerId | None = None
    """The worker that computes the end of the prompt, if that can be copied by layer."""
    layers_done: int = 0


@dataclass(slots=True)
class ChunkTransfers:
    """The granted transfers that are copied by layer: at most one per streamed request. They may outlive its stream."""

    hosts: HostPools
    table: TransferTable
    _chunks: dict[RequestId, ChunkTransfer] = field(default_factory=dict[RequestId, ChunkTransfer])
    _copies: dict[int, ChunkTransfer] = field(default_factory=dict[int, ChunkTransfer])
    """Transfers by the numbers of their copies under way."""

    def computed(self, host: HostId, event: PrefillFinished) -> Commands:
        """Copy the last layers after the end of the step. Must be called before the pool gets the event."""
        chunk = self._chunks.get(event.request_id)
        if chunk is None or chunk.source != host:
            return ()
        if not self.hosts.pools[host].is_computing(event.request_id, event.attempt, event.worker):
            return ()
        chunk.is_computed = True
        return self.send_layers(chunk, self.hosts.layouts[host].layers)

    def land(self, chunk: ChunkTransfer, granted: LandingGranted) -> Steps[None]:
        """Lease the blocks of a chunk at the source. Copy the sealed ones, and the finished layers of the others."""
        self._chunks[chunk.request.id] = chunk
        yield ToPool(chunk.source, LeaseWanted(chunk.request, ()))
        source, write, cached = self.hosts.pools[chunk.source], granted.block_table, granted.cached_blocks
        chunk.is_leasing, chunk.cached_tokens = True, cached * source.block_tokens
        table, sealed_tokens = source.table(chunk.request.id)
        sealed = max(cached, min(sealed_tokens // source.block_tokens, len(write)))
        chunk.read, chunk.write = table[sealed : len(write)], write[sealed:]
        chunk.first_token = sealed * source.block_tokens
        if sealed > cached:
            tokens = range(chunk.cached_tokens, chunk.first_token)
            yield self._copy(chunk, tokens, table[cached:sealed], write[cached:sealed])
        yield from self.send_layers(chunk, chunk.layers_done)

    def send_layers(self, chunk: ChunkTransfer, layers_done: int) -> Steps[None]:
        """Copy the layers that are computed and not sent."""
        layers = self.hosts.layouts[chunk.source].layers
        chunk.layers_done = max(chunk.layers_done, layers_done)
        if chunk.has_failed or chunk.state != "copying" or chunk.layers_done == chunk.layers_sent:
            return
        span = LayerSpan(chunk.layers_sent, chunk.layers_done, layers)
        chunk.layers_sent = chunk.layers_done
        if chunk.read:
            cut = None if span.end - span.first == layers else span
            tokens = range(chunk.first_token, chunk.tokens)
            yield self._copy(chunk, tokens, chunk.read, chunk.write, cut)

    def _copy(
        self,
        chunk: ChunkTransfer,
        tokens: range,
        read: tuple[BlockId, ...],
        write: tuple[BlockId, ...],
        layers: LayerSpan | None = None,
    ) -> CopyBlocks:
        """Record a copy of a chunk. Return its command."""
        copy = chunk.copy(self.table.next_number(), tokens, read, write, layers)
        chunk.copies += 1
        self._copies[copy.number] = chunk
        return copy

    def has_copy(self, number: int) -> bool:
        """Return whether the copy with this number belongs to a chunk."""
        return number in self._copies

    def copy_ended(self, end: CopyEnded) -> ChunkTransfer | None:
        """Note the end of a chunk's copy. Return its transfer if that is over."""
        chunk = self._copies.pop(end.number)
        chunk.copies -= 1
        chunk.has_failed = chunk.has_failed or not end.landed
        return self._over(chunk)

    def settle(self, request_id: RequestId) -> ChunkTransfer | None:
        """End a computed or failed chunk if none of its copies is under way. Return its transfer if that has ended."""
        chunk = self._chunks.get(request_id)
        return None if chunk is None else self._over(chunk)

    def call_off(self, request_id: RequestId) -> ChunkTransfer | None:
        """Give up an unfinished chunk: its copied layers are useless. Return its transfer if that is over."""
        chunk = self._chunks.get(request_id)
        if chunk is None or chunk.is_computed:
            return None
        chunk.has_failed = True
        return self._over(chunk)

    def requests_on(self, lost: WorkerId | HostId) -> list[RequestId]:
        """Return the requests whose chunk is computed, read or written on this lost worker or host."""
        return [name for name, chunk in self._chunks.items() if lost in (chunk.worker, chunk.source, chunk.target)]

    def _over(self, chunk: ChunkTransfer) -> ChunkTransfer | None:
        if chunk.copies or not (chunk.has_failed or chunk.is_computed):
            return None
        if self._chunks.get(chunk.request.id) is chunk:
            del self._chunks[chunk.request.id]
        return chunk


@dataclass(slots=True)
class Streams:
    """The streams: at most one per live request, with at most one transfer under way."""

    hosts: HostPools
    table: TransferTable
    chunks: ChunkTransfers
    _streams: dict[RequestId, Stream] = field(default_factory=dict[RequestId, Stream])

    # ---- the begin and the end of a stream

    def begin(self, command: SendAhead, target: HostId) -> Steps[None]:
        """Begin a stream: copy the sealed blocks now, and further ones when they are sealed."""
        stream = self._streams[command.request.id] = Stream(
            request=command.request,
            attempt=command.attempt,
            source=command.source,
            target=target,
            run_tokens=command.run_tokens,
            report=command.report,
        )
        yield from self._send_more(stream)

    def stop(self, request_id: RequestId) -> ChunkTransfer | None:
        """End the stream of a request, and give up its unfinished chunk. Return the chunk's transfer if it is over."""
        self._streams.pop(request_id, None)
        return self.chunks.call_off(request_id)

    def lose_host(self, host: HostId) -> list[Stream]:
        """Remove the streams from a lost host and to it. Return those that the coordinator waits for."""
        lost = [stream for stream in self._streams.values() if host in (stream.source, stream.target)]
        for stream in lost:
            del self._streams[stream.request.id]
        return [stream for stream in lost if stream.report]

    def _end(self, stream: Stream, *, landed: bool) -> Steps[None]:
        del self._streams[stream.request.id]
        if stream.report:
            yield AheadEnded(stream.request.id, stream.attempt, landed)

    # ---- transfers of a stream

    def sealed(self, request_id: RequestId) -> Commands:
        """Copy the blocks sealed since the last copy, unless a transfer is under way."""
        stream = self._streams.get(request_id)
        return () if stream is None or stream.transfer is not None else self._send_more(stream)

    def transfer_ended(self, transfer: Transfer, *, landed: bool) -> Steps[None]:
        """Continue a stream after one of its transfers has ended. End it after a chunk, which is the last transfer."""
        stream = self._streams.get(transfer.request.id)
        if stream is None or stream.transfer is not transfer:
            return
        stream.transfer = None
        if landed and not isinstance(transfer, ChunkTransfer):
            yield from self._send_more(stream)
        else:
            yield from self._end(stream, landed=landed)

    def _send_more(self, stream: Stream) -> Steps[None]:
        """Begin the next copy: the chunk under computation if possible, else new sealed blocks that fill a run."""
        request, source, target = stream.request, self.hosts.pools[stream.source], self.hosts.pools[stream.target]
        if stream.worker is not None and self._can_land(stream, stream.worker):
            stream.sent_tokens = request.prompt_tokens
            chunk = ChunkTransfer(
                number=self.table.next_number(),
                request=request,
                source=stream.source,
                target=stream.target,
                tokens=request.prompt_tokens,
                hashes=hashes_per_block(request.block_hashes, source.block_runs),
                worker=stream.worker,
                layers_done=stream.layers_done,
            )
            stream.transfer = self.table.add(chunk)
            yield chunk.ask_for_blocks(stream.attempt, source.block_tokens)
            return
        tokens = self._sealed_tokens(stream)
        first, least_tokens = target.behind(max(tokens, request.prompt_tokens - 1)), stream.run_tokens
        if tokens <= first * target.block_tokens:
            tokens = 0  # all sealed blocks are behind the attention window of the next token
        fresh_tokens = tokens - stream.sent_tokens
        if stream.report:
            least_tokens = 1 + max(source.block_tokens, target.block_tokens)
            if fresh_tokens < least_tokens or stream.rounds >= ROUNDS_MAX:
                yield from self._end(stream, landed=True)
                return
        if fresh_tokens < max(1, least_tokens):
            return
        stream.rounds += 1
        stream.sent_tokens = tokens
        hashes = self.hosts.hashes_at(stream.source, stream.target, request, tokens)
        stream.transfer = transfer = self.table.begin(
            request, source=stream.source, target=stream.target, tokens=tokens, hashes=hashes
        )
        yield transfer.ask_for_blocks(stream.attempt, target.block_tokens, first)

    def _sealed_tokens(self, stream: Stream) -> int:
        """Return the number of leading tokens that are sealed at the source and fill whole blocks on both hosts."""
        source, target = self.hosts.pools[stream.source], self.hosts.pools[stream.target]
        tokens = len(source.sealed_hashes(stream.request.id)) * source.block_tokens
        if not stream.report:  # the target must compute the last token of a prompt
            tokens = min(tokens, stream.request.prompt_tokens - 1)
        return len(self.hosts.hashes_at(stream.source, stream.target, stream.request, tokens)) * target.block_tokens

    # ---- chunks: the conditions, and events of workers

    def groups(self, host: HostId, wanted: int) -> int:
        """Return the number of layer groups, at most `wanted`, that this host's workers can report. 1: no reports."""
        layout = self.hosts.layouts.get(host)
        return min(wanted, layout.layers) if layout is not None and layout.ranks == 1 else 1

    def _can_cut(self, stream: Stream) -> bool:
        """Return whether the stream's KV can be copied by layer: both hosts have the same layout, with one rank.

        The model must have no attention window, which would release blocks during the step.
        """
        source, target = self.hosts.layouts.get(stream.source), self.hosts.layouts.get(stream.target)
        if source is None or source != target or stream.report:
            return False
        return self.hosts.pools[stream.source].window is None and self.groups(stream.source, 2) > 1

    def _can_land(self, stream: Stream, worker: WorkerId) -> bool:
        """Return whether the worker computes the prompt and has blocks for all of it."""
        request, source = stream.request, self.hosts.pools[stream.source]
        if not source.is_computing(request.id, stream.attempt, worker):
            return False
        return len(source.table(request.id)[0]) >= -(-request.prompt_tokens // source.block_tokens)

    def layers_done(self, done: LayersDone) -> Steps[None]:
        """Copy finished layers, one request after the other. Does nothing for a lost worker."""
        worker = self.hosts.workers.get(done.worker)
        if worker is None:
            return
        for request_id, attempt in done.requests:
            stream = self._streams.get(request_id)
            if stream is None or (stream.attempt, stream.source) != (attempt, worker.host) or not self._can_cut(stream):
                continue  # a late event, or a stream whose layers cannot be cut
            if not self.hosts.pools[worker.host].is_computing(request_id, attempt, done.worker):
                continue
            stream.worker = stream.worker or done.worker
            stream.layers_done = max(stream.layers_done, done.layers)
            if stream.transfer is None:
                yield from self._send_more(stream)
            elif isinstance(stream.transfer, ChunkTransfer):
                yield from self.chunks.send_layers(stream.transfer, stream.layers_done)
