"""The state machine of all KV transfers of a cluster: between hosts, from tiers and by remote pools.

A request starts where its KV is not, and waits for a transfer. Or it still runs, and its sealed blocks are sent ahead
to where it will probably go on, so that little is left to transfer then. Blocks of a prompt that a tier has are read
before the request starts, where that is cheaper than computing them.

`Transfers.handle` returns commands. A follow-up among them comes back as an event once the commands before it were
carried out with all their consequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import assert_never

from baton.core.copies import (
    CopyBlocks,
    CopyEnded,
    LandingGranted,
    LandingRefused,
    LayersDone,
)
from baton.core.handoff_paths import WayChosen
from baton.core.messages import (
    AheadEnded,
    BlocksSealed,
    HostLost,
    ReleaseBlocks,
    RequestDropped,
    SendAhead,
    StartDecode,
    StartPrefill,
    StopRequest,
    ToWorker,
    WorkerJoined,
    WorkerLost,
)
from baton.core.tier_messages import (
    FromTier,
    LoadBlocks,
    PutEnded,
    ReadBackWanted,
    StoreBlocks,
)
from baton.core.types import HostId, Request, RequestId, TierHit, WorkerId, WorkerView
from baton.decide.control.advice import Policies
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.landings import Landings
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.pool_transfers import PoolTransfers
from baton.decide.control.request_starts import RequestStarts
from baton.decide.control.streams import Streams
from baton.decide.control.tier_reads import TierReads
from baton.decide.control.transfer import (
    Begin,
    BeginFromTiers,
    ChunkOver,
    Computed,
    Fetch,
    FollowUp,
    GoOn,
    HostGone,
    Leased,
    Over,
    Place,
    PutOver,
    ReadDone,
    ReadPool,
    Redirect,
    Release,
    SendMore,
    Settle,
    Start,
    TierGrew,
    TransferTable,
)
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
    | BlocksSealed
    | WorkerJoined
    | WorkerLost
    | HostLost
    | FollowUp
)
TransferCommand = (
    ToPool | ToWorker | CopyBlocks | Begin | AheadEnded | RequestDropped | WayChosen | LayersDone | HostLost | FollowUp
)


class Transfers:
    """Owns the record of every transfer. Its pools and workers are those of the cluster, which changes them."""

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
        self._tiers = TierReads(cost=policies.cost, table=self.table, pools=pools, workers=workers, links=self.links)
        self._by_pool = PoolTransfers(
            policies=policies, table=self.table, pools=pools, workers=workers, homes=self._homes, links=self.links
        )
        self._starts = RequestStarts(
            table=self.table,
            pools=pools,
            workers=workers,
            homes=self._homes,
            layers=self._layers,
            tiers=self._tiers,
            by_pool=self._by_pool,
        )

    @property
    def waiting_for_pools(self) -> tuple[RequestId, ...]:
        """Requests that wait for a remote pool, or are put into one."""
        return self._by_pool.waiting

    @property
    def copies_layers(self) -> bool:
        """Tell whether the end of some prompt is copied by layer."""
        return self._layers.is_active

    def add_host(self, host: HostId, layout: KVLayout) -> None:
        """Note the layout of KV on a host."""
        self._layers.layouts[host] = layout

    def tier_hits(self, request: Request) -> dict[HostId, tuple[TierHit, ...]]:
        """Return what the tiers of every host can add to the blocks that its arena holds of a prompt."""
        return self._tiers.hits(request)

    def handle(self, event: TransferEvent, now_s: float) -> list[TransferCommand]:
        """Apply one event and return what must be done about it, in order. Late and repeated events change nothing."""
        match event:
            case StartPrefill() | StartDecode():
                return [*self._starts.start(event, now_s)]
            case BlocksSealed(request_id=request_id):
                return [*self._streams.sealed(request_id), *self._by_pool.sealed(request_id)]
            case ReleaseBlocks(request_id=request_id):
                return [*self._starts.release(request_id)]
            case Computed(host=host, event=prefill):
                return [*self._layers.computed(host, prefill, now_s)]
            case LandingGranted() | LandingRefused() | ReadBackWanted() | PutEnded():
                return self._handle_pool(event, now_s)
            case StoreBlocks() | LoadBlocks():
                self._tiers.begins(event, now_s)
                return []
            case CopyEnded():
                return self._copy_ended(event, now_s)
            case FromTier(host=host, news=news):
                return [*self._tiers.handle(host, news, now_s)]
            case LayersDone():
                return self._layers_done(event, now_s)
            case SendAhead():
                return self._send_ahead(event, now_s)
            case StopRequest():
                return [*self._starts.stop(event)]
            case WorkerJoined() | WorkerLost() | HostLost():
                return self._handle_fleet(event)
            case _:
                return self._follow_up(event, now_s)

    def _follow_up(self, event: FollowUp, now_s: float) -> list[TransferCommand]:
        match event:
            case Redirect(start=start):
                return [*self._starts.redirect(start, now_s)]
            case Place(start=start):
                return [*self._starts.place(start, now_s)]
            case Fetch():
                return [*self._landings.fetch(event)]
            case BeginFromTiers(start=start, target=target):
                reads = self._tiers.fetch(start, target=target, source=None)
                return [*reads] if reads else [*self._starts.begin(start)]
            case Leased():
                return [*self._landings.copy(event, now_s)]
            case ReadDone() | ChunkOver() | Over() | GoOn():
                return self._end(event)
            case SendMore(stream=stream):
                return [*self._streams.send_more(stream)]
            case Release(request_id=request_id):
                return [*self._starts.release_homes(request_id)]
            case ReadPool() | PutOver() | TierGrew():
                return [*self._by_pool.follow_up(event)]
            case HostGone(host=host, streams=streams):
                # A stream that is not reported keeps its request counted as one about to move.
                ended = [AheadEnded(each.request.id, each.attempt, landed=False) for each in streams if each.report]
                return [*ended, *self._by_pool.lose_host(host)]
            case Settle(request_id=request_id):
                return [*self._layers.settle(request_id)]
            case _:
                assert_never(event)

    def _handle_fleet(self, event: WorkerJoined | WorkerLost | HostLost) -> list[TransferCommand]:
        match event:
            case WorkerJoined(view=view):
                self.links.joined(view)
                return []
            case WorkerLost(worker=worker):
                return [*self._layers.lose(worker)]
            case HostLost():
                return self._lose_host(event)

    def _lose_host(self, lost: HostLost) -> list[TransferCommand]:
        """End what used a lost host. The coordinator is told in between: it starts the requests elsewhere."""
        host = lost.host
        streams = self.table.lose_host(host)
        self.links.lose_host(host)
        self._tiers.lose_host(host)
        for homes in self._homes.values():
            homes.discard(host)
        chunks = self._layers.lose(host)
        self._layers.layouts.pop(host, None)
        return [*chunks, lost, HostGone(host, streams)]

    # ---- a running request is sent ahead

    def _send_ahead(self, command: SendAhead, now_s: float) -> list[TransferCommand]:
        """Copy the sealed blocks of a running request to where it will probably go on, and more as they are sealed."""
        target = self._workers[command.worker].host
        if command.source == target:
            return []
        chosen: list[TransferCommand] = []
        if not command.report:
            commands, is_by_pool = self._by_pool.stream(command, target, now_s)
            chosen = [*commands]
            if is_by_pool:
                return chosen
        return [*chosen, *self._streams.begin(command, target)]

    def _layers_done(self, done: LayersDone, now_s: float) -> list[TransferCommand]:
        """Copy finished layers, one request after the other."""
        worker = self._workers.get(done.worker)
        if worker is None:
            return []
        if len(done.requests) > 1:
            return [LayersDone(done.worker, (each,), done.layers) for each in done.requests]
        return [*self._layers.layers_done(worker.host, done, now_s)] if done.requests else []

    # ---- answers of pools

    def _handle_pool(
        self, event: LandingGranted | LandingRefused | ReadBackWanted | PutEnded, now_s: float
    ) -> list[TransferCommand]:
        match event:
            case LandingGranted():
                return [*self._landings.granted(event, now_s)]
            case LandingRefused(host=host, request_id=request_id):
                return self._refused(host, request_id)
            case ReadBackWanted():
                return [self._tiers.read_back(event)]
            case PutEnded():
                return [*self._by_pool.put_ended(event)]
            case _:
                assert_never(event)

    def _refused(self, host: HostId, request_id: RequestId) -> list[TransferCommand]:
        """Give up a transfer sent or read ahead: its target has no free blocks."""
        read = self.table.reads_ahead.get((request_id, host))
        if read is None or read.state != "landing":
            return [*self._streams.refused(request_id)]
        self.table.drop(read)
        return [*self._by_pool.read_over(read, is_whole=False)]

    # ---- the end of a transfer

    def _end(self, event: ReadDone | ChunkOver | Over | GoOn) -> list[TransferCommand]:
        """Take the next step of a transfer that ends: tell both pools, then its stream or the start that waits."""
        match event:
            case ReadDone(number=number, request_id=request_id, whole=whole):
                # The blocks behind the first that was missing are computed again.
                blocks = sum(takewhile(bool, whole))
                landed = blocks == len(whole)
                return [*self._landings.ended(number, request_id, blocks=blocks, landed=landed)]
            case ChunkOver(transfer=transfer, landed=landed):
                return [*self._landings.chunk_over(transfer, landed=landed)]
            case Over():
                return self._over(event)
            case GoOn(transfer=transfer):
                return [*self._starts.go_on(transfer)]

    def _copy_ended(self, end: CopyEnded, now_s: float) -> list[TransferCommand]:
        """A copy is over: nothing reads its source or writes its target any more."""
        self.links.copy_ends(end, now_s)
        chunks = self._layers.copy_ended(end)
        if chunks is not None:
            return [*chunks]
        blocks = None if end.landed else 0
        return [*self._landings.ended(end.number, end.request_id, blocks=blocks, landed=end.landed)]

    def _over(self, over: Over) -> list[TransferCommand]:
        transfer = over.transfer
        if transfer.is_read_ahead:
            return [*self._by_pool.read_over(transfer, is_whole=over.is_whole)]
        commands: list[TransferCommand] = [*self._streams.over(transfer, landed=over.is_whole)]
        if not over.is_awaited:
            return commands
        return [*commands, GoOn(transfer)] if over.is_whole else [*commands, *self._starts.begin_awaited(transfer)]
