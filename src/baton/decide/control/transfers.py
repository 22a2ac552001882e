"""The state machine of all KV transfers of a cluster: between hosts, from tiers and through remote pools.

A request that starts on a host without its KV waits for a transfer. The sealed blocks of a running request may be sent
ahead to the host that will probably continue it, so that little is left to transfer. Prompt blocks in a tier are read
before the start if that is cheaper than to compute them.

`Transfers.handle` yields commands one by one, and continues after each was carried out with all its consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import assert_never

from baton.core.copies import CopyEnded, LandingGranted, LandingRefused, LayersDone
from baton.core.messages import (
    AheadEnded,
    BlocksSealed,
    HostLost,
    ReleaseBlocks,
    SendAhead,
    StartDecode,
    StartPrefill,
    StopRequest,
    WorkerJoined,
    WorkerLost,
)
from baton.core.tier_messages import FromTier, LoadBlocks, LoadEnded, PutEnded, ReadBackWanted, StoreBlocks
from baton.core.types import HostId, Request, RequestId, TierHit, WorkerId, WorkerView
from baton.decide.control.advice import Policies
from baton.decide.control.landings import Landings
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.pool_transfers import PoolTransfers
from baton.decide.control.request_starts import RequestStarts
from baton.decide.control.streams import Streams
from baton.decide.control.tier_reads import TierReads
from baton.decide.control.transfer import Computed, Over, Settle, Start, Steps, Transfer, TransferTable
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.layout import KVLayout

TransferEvent = (
    Start
    | SendAhead
    | StopRequest
    | ReleaseBlocks
    | LandingGranted
    | LandingRefused
    | ReadBackWanted
    | PutEnded
    | StoreBlocks
    | LoadBlocks
    | CopyEnded
    | FromTier
    | LayersDone
    | Computed
    | Settle
    | BlocksSealed
    | WorkerJoined
    | WorkerLost
    | HostLost
)


class Transfers:
    """Owns all transfers. The cluster updates the pools and workers, which are shared with it."""

    def __init__(
        self, policies: Policies, pools: Mapping[HostId, HostPool], workers: Mapping[WorkerId, WorkerView]
    ) -> None:
        self.links = LinkEstimates(pools=pools, cost=policies.cost)
        self.table = TransferTable()
        self._pools = pools
        self._workers = workers
        self._homes: dict[RequestId, set[HostId]] = {}
        """Hosts whose pools know each request."""
        self._layers = LayerTransfers(table=self.table, pools=pools, links=self.links)
        self._landings = Landings(
            table=self.table, pools=pools, homes=self._homes, links=self.links, layers=self._layers
        )
        self._streams = Streams(table=self.table, pools=pools, layers=self._layers)
        self._tiers = TierReads(cost=policies.cost, pools=pools, workers=workers, links=self.links)
        self._by_pool = PoolTransfers(policies=policies, table=self.table, pools=pools, links=self.links)
        self._starts = RequestStarts(
            table=self.table,
            pools=pools,
            workers=workers,
            homes=self._homes,
            landings=self._landings,
            layers=self._layers,
            tiers=self._tiers,
            by_pool=self._by_pool,
        )

    @property
    def waiting_for_pools(self) -> tuple[RequestId, ...]:
        """Requests that wait for a remote pool, or are streamed into one."""
        return self._by_pool.waiting

    @property
    def copies_layers(self) -> bool:
        """Return whether the end of a prompt is being copied layer by layer."""
        return self._layers.is_active

    def add_host(self, host: HostId, layout: KVLayout) -> None:
        """Record the KV layout of a host."""
        self._layers.layouts[host] = layout

    def tier_hits(self, request: Request) -> dict[HostId, tuple[TierHit, ...]]:
        """Return, by host, the longer prefixes of a prompt that reads from its tiers can provide."""
        return self._tiers.hits(request)

    def handle(self, event: TransferEvent, now_s: float) -> Steps[None]:
        """Apply one event and yield the resulting commands. Late and repeated events have no effect."""
        match event:
            case StartPrefill() | StartDecode():
                yield from self._start(event, now_s)
            case StopRequest():
                yield from self._starts.stop(event)
            case ReleaseBlocks(request_id=request_id):
                yield from self._release(request_id, now_s)
            case SendAhead():
                yield from self._send_ahead(event, now_s)
            case BlocksSealed(request_id=request_id):
                yield from self._streams.sealed(request_id)
                yield from self._by_pool.sealed(request_id)
            case LayersDone():
                yield from self._layers_done(event, now_s)
            case Computed(host=host, event=prefill):
                yield from self._layers.computed(host, prefill, now_s)
            case Settle(request_id=request_id):
                yield from self._chunk_over(self._layers.settle(request_id), now_s)
            case WorkerJoined(view=view):
                self.links.joined(view)
            case WorkerLost(worker=worker):
                yield from self._lose_chunks(worker, now_s)
            case HostLost():
                yield from self._lose_host(event, now_s)
            case _:
                yield from self._bytes_moved(event, now_s)

    def _bytes_moved(
        self,
        event: LandingGranted
        | LandingRefused
        | ReadBackWanted
        | PutEnded
        | StoreBlocks
        | LoadBlocks
        | CopyEnded
        | FromTier,
        now_s: float,
    ) -> Steps[None]:
        """Continue transfers whose blocks were granted, copied, written or read."""
        match event:
            case LandingGranted():
                yield from self._over((yield from self._landings.granted(event, now_s)), now_s)
            case LandingRefused(host=host, request_id=request_id):
                yield from self._refused(host, request_id, now_s)
            case CopyEnded():
                yield from self._copy_ended(event, now_s)
            case StoreBlocks() | LoadBlocks():
                self._tiers.begins(event, now_s)
            case FromTier():
                yield from self._tier_moved(event, now_s)
            case PutEnded():
                yield from self._starts.resume(self._by_pool.put_ended(event), now_s)
            case ReadBackWanted():
                yield self._tiers.read_back(event, self.table.next_number())
            case _:
                assert_never(event)

    # ---- requests that start, run and close

    def _start(self, start: Start, now_s: float) -> Steps[None]:
        """Start a request after the transfer of its KV, if it needs one."""
        request_id = start.request.id
        self._homes.setdefault(request_id, set())
        self._by_pool.forget(request_id)  # an abandoned attempt may still wait there
        if not self.table.is_empty:
            self.table.streams.pop(request_id, None)
            yield from self._chunk_over(self._layers.call_off(request_id), now_s)
            if (yield from self._starts.redirect(start)):
                yield from self._chunk_over(self._layers.settle(request_id), now_s)
                return
        yield from self._starts.place(start, now_s)

    def _release(self, request_id: RequestId, now_s: float) -> Steps[None]:
        if not self.table.is_empty:
            self.table.streams.pop(request_id, None)
            yield from self._chunk_over(self._layers.call_off(request_id), now_s)
        yield from self._starts.release(request_id)

    def _send_ahead(self, command: SendAhead, now_s: float) -> Steps[None]:
        """Begin to send the sealed blocks of a running request to the host that will probably continue it."""
        target = self._workers[command.worker].host
        if command.source == target:
            return
        if not command.report and (yield from self._by_pool.stream(command, target, now_s)):
            return
        yield from self._streams.begin(command, target)

    def _layers_done(self, done: LayersDone, now_s: float) -> Steps[None]:
        """Copy finished layers, one request after the other."""
        worker = self._workers.get(done.worker)
        if worker is None:
            return
        for request in done.requests:
            stream = self._layers.progress(worker.host, done, request)
            if stream is None:
                continue
            if stream.transfer is None:
                yield from self._streams.send_more(stream)
            elif stream.transfer.chunk is not None:
                yield from self._layers.copy_done(stream.transfer, now_s)

    # ---- the fleet changes

    def _lose_chunks(self, lost: WorkerId | HostId, now_s: float) -> Steps[None]:
        for request_id in self._layers.on(lost):
            yield from self._chunk_over(self._layers.call_off(request_id), now_s)

    def _lose_host(self, lost: HostLost, now_s: float) -> Steps[None]:
        """End the transfers of a lost host. In between, the coordinator starts its requests on other hosts."""
        host = lost.host
        streams = self.table.lose_host(host)
        self.links.lose_host(host)
        self._tiers.lose_host(host)
        for homes in self._homes.values():
            homes.discard(host)
        yield from self._lose_chunks(host, now_s)
        self._layers.layouts.pop(host, None)
        yield lost
        for stream in streams:
            if stream.report:  # without this event, the request would count as moving until its end
                yield AheadEnded(stream.request.id, stream.attempt, landed=False)
        for ready in self._by_pool.lose_host(host):
            yield from self._starts.resume(ready, now_s)

    # ---- the end of a transfer

    def _refused(self, host: HostId, request_id: RequestId, now_s: float) -> Steps[None]:
        """Give up a transfer sent or read ahead: its target has no free blocks."""
        read = self.table.reads_ahead.get((request_id, host))
        if read is None or read.state != "landing":
            yield from self._streams.refused(request_id)
            return
        self.table.drop(read)
        yield from self._starts.resume((yield from self._by_pool.read_over(read, is_whole=False)), now_s)

    def _copy_ended(self, end: CopyEnded, now_s: float) -> Steps[None]:
        """Continue the transfer or the chunk of a copy that has ended."""
        self.links.copy_ends(end, now_s)
        if end.number in self._layers.copies:
            yield from self._chunk_over(self._layers.copy_ended(end), now_s)
            return
        if not self.table.has(end.number, end.request_id):
            return
        blocks = None if end.landed else 0
        over = yield from self._landings.ended(end.number, end.request_id, blocks=blocks, landed=end.landed)
        yield from self._over(over, now_s)

    def _tier_moved(self, event: FromTier, now_s: float) -> Steps[None]:
        """Pass an event of a tier to its pool, then continue the transfers that waited for it."""
        news = event.news
        # The swap-in of a preempted request belongs to no transfer: its pool alone handles the end.
        is_transfer = isinstance(news, LoadEnded) and self.table.has(news.number, news.request_id)
        grown = yield from self._tiers.note(event.host, news, now_s)
        if grown is not None:
            yield from self._by_pool.tier_grew(grown)
        if isinstance(news, LoadEnded) and is_transfer:
            blocks = sum(takewhile(bool, news.whole))  # blocks after the first missing one are recomputed
            landed = blocks == len(news.whole)
            over = yield from self._landings.ended(news.number, news.request_id, blocks=blocks, landed=landed)
            yield from self._over(over, now_s)

    def _chunk_over(self, transfer: Transfer | None, now_s: float) -> Steps[None]:
        """End the transfer of a chunk. Does nothing for None: there is no chunk, or a copy of it is under way."""
        if transfer is not None:
            yield from self._over((yield from self._landings.chunk_over(transfer)), now_s)

    def _over(self, over: Over | None, now_s: float) -> Steps[None]:
        """Continue the pool read, the stream or the start that waited for an ended transfer."""
        if over is None:
            return
        if over.transfer.is_read_ahead:
            ready = yield from self._by_pool.read_over(over.transfer, is_whole=over.is_whole)
            yield from self._starts.resume(ready, now_s)
            return
        yield from self._streams.over(over.transfer, landed=over.is_whole)
        if over.is_awaited:
            yield from self._starts.go_on(over.transfer)
