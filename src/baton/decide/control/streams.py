"""Streams: copies of a running request's sealed blocks to the host that will probably continue it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.copies import LandingWanted
from baton.core.messages import AheadEnded, SendAhead
from baton.core.types import HostId, RequestId
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import names_at
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.transfer import ROUNDS_MAX, Steps, Stream, Transfer, TransferTable
from baton.decide.kv.host_pool import HostPool


@dataclass(slots=True, kw_only=True)
class Streams:
    """The streams: at most one per live request, with at most one transfer under way."""

    table: TransferTable
    pools: Mapping[HostId, HostPool]
    layers: LayerTransfers

    def begin(self, command: SendAhead, target: HostId) -> Steps[None]:
        """Begin a stream: copy the sealed blocks now, and further ones when they are sealed."""
        stream = Stream(
            request=command.request,
            attempt=command.attempt,
            source=command.source,
            target=target,
            run_tokens=command.run_tokens,
            report=command.report,
        )
        self.table.streams[command.request.id] = stream
        yield from self.send_more(stream)

    def sealed(self, request_id: RequestId) -> Steps[None]:
        """Copy the blocks sealed since the last copy, unless a transfer is under way."""
        stream = self.table.streams.get(request_id)
        if stream is not None and stream.transfer is None:
            yield from self.send_more(stream)

    def refused(self, request_id: RequestId) -> Steps[None]:
        """End a stream whose target has no free blocks."""
        stream = self.table.streams[request_id]
        assert stream.transfer is not None, f"{request_id} is refused blocks that no transfer asked for"
        self.table.drop(stream.transfer)
        yield from self._end(stream, landed=False)

    def over(self, transfer: Transfer, *, landed: bool) -> Steps[None]:
        """Continue a stream after one of its transfers has ended. End it after a chunk, which is the last transfer."""
        stream = self.table.streams.get(transfer.request.id)
        if stream is None or stream.transfer is not transfer:
            return
        stream.transfer = None
        if landed and transfer.chunk is None:
            yield from self.send_more(stream)
        else:
            yield from self._end(stream, landed=landed)

    def send_more(self, stream: Stream) -> Steps[None]:
        """Copy the newly sealed blocks if they are enough for a copy, or the chunk that is being computed."""
        wanted = self.layers.begin(stream)
        if wanted is not None:
            yield ToPool(stream.target, wanted)
            return
        request, target = stream.request, self.pools[stream.target]
        tokens, least_tokens = self._sealed_tokens(stream), stream.run_tokens
        first = target.behind(max(tokens, request.prompt_tokens - 1))
        if tokens <= first * target.block_tokens:
            tokens = 0  # all sealed blocks are behind the attention window of the next token
        fresh_tokens = tokens - stream.sent_tokens
        if stream.report:
            least_tokens = 1 + max(self.pools[host].block_tokens for host in (stream.source, stream.target))
        if stream.report and (fresh_tokens < least_tokens or stream.rounds >= ROUNDS_MAX):
            yield from self._end(stream, landed=True)
            return
        if fresh_tokens < max(1, least_tokens):
            return
        stream.rounds += 1
        stream.sent_tokens = tokens
        names = names_at(self.pools[stream.source], target, request, tokens)
        stream.transfer = Transfer(
            number=self.table.next_number(),
            request=request,
            source=stream.source,
            target=stream.target,
            tokens=tokens,
            names=names,
        )
        self.table.add(stream.transfer)
        yield ToPool(stream.target, LandingWanted(request, stream.attempt, None, len(names), names, first))

    def _sealed_tokens(self, stream: Stream) -> int:
        """Return the number of leading tokens that are sealed at the source and fill whole blocks on both hosts."""
        source, target = self.pools[stream.source], self.pools[stream.target]
        tokens = len(source.names(stream.request.id)) * source.block_tokens
        if not stream.report:  # the target must compute the last token of a prompt
            tokens = min(tokens, stream.request.prompt_tokens - 1)
        tokens -= tokens % target.block_tokens
        return len(names_at(source, target, stream.request, tokens)) * target.block_tokens

    def _end(self, stream: Stream, *, landed: bool) -> Steps[None]:
        del self.table.streams[stream.request.id]
        if stream.report:
            yield AheadEnded(stream.request.id, stream.attempt, landed)
