"""Starts of requests on workers: each waits for the transfer of its KV, or begins with the KV that is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.handoff_paths import WayChosen
from baton.core.messages import (
    ReleaseBlocks,
    RequestDropped,
    StartDecode,
    StartPrefill,
    StopRequest,
    ToWorker,
)
from baton.core.types import HostId, RequestId, WorkerId, WorkerView
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import names_at, tokens_at
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.pool_transfers import PoolTransfers
from baton.decide.control.tier_reads import TierReads
from baton.decide.control.transfer import (
    Begin,
    Fetch,
    FollowUp,
    Redirect,
    Release,
    Settle,
    Start,
    Transfer,
    TransferTable,
)
from baton.decide.kv.host_pool import HostPool

Command = ToPool | ToWorker | Begin | RequestDropped | WayChosen | FollowUp


@dataclass(slots=True, kw_only=True)
class RequestStarts:
    """Chooses where the KV of every start comes from. Knows the hosts whose pools know a request."""

    table: TransferTable
    pools: Mapping[HostId, HostPool]
    workers: Mapping[WorkerId, WorkerView]
    homes: dict[RequestId, set[HostId]]
    """Hosts whose pools know each request."""
    layers: LayerTransfers
    tiers: TierReads
    by_pool: PoolTransfers

    def start(self, start: Start, now_s: float) -> list[Command]:
        """Start a request after its KV was brought from where it is."""
        request_id = start.request.id
        self.homes.setdefault(request_id, set())
        self.by_pool.forget(request_id)  # it may wait there since an attempt that was given up
        if self.table.is_empty:
            return self.place(start, now_s)
        self.table.streams.pop(request_id, None)
        return [*self.layers.call_off(request_id), Redirect(start)]

    def redirect(self, start: Start, now_s: float) -> list[Command]:
        request_id, target = start.request.id, self.workers[start.worker].host
        transfer = self.table.awaited(request_id)
        if transfer is not None and transfer.target != target:
            return [*self._give_up(transfer), Redirect(start)]
        transfer = transfer or self.table.revive(request_id, target)
        if transfer is None:
            return self.place(start, now_s)
        transfer.start = start
        self.homes[request_id].add(target)
        return [ToPool(target, start), Settle(request_id)]

    def place(self, start: Start, now_s: float) -> list[Command]:
        """Bring the KV of a request that no transfer serves, then start it."""
        request_id, worker = start.request.id, self.workers.get(start.worker)
        if worker is None:
            return []  # it died while the request waited: the coordinator starts the request elsewhere
        target, homes = worker.host, self.homes[request_id]
        if self.by_pool.hold(start, target):
            return []
        source = start.fetch if isinstance(start, StartPrefill) else self._best_source(start, target)
        homes.add(target)
        reads = self.tiers.fetch(start, target=target, source=source)
        if reads:
            return [*reads]
        tokens = tokens_at(self.pools, source, start) if source != target else 0
        if source is None or tokens == 0:
            return self.begin(start)
        chosen: list[Command] = []
        if isinstance(start, StartDecode):
            commands, is_handed_off = self.by_pool.hand_off(start, source=source, target=target, now_s=now_s)
            chosen = [*commands]
            if is_handed_off:
                return chosen
        homes.add(source)
        names = names_at(self.pools[source], self.pools[target], start.request, tokens)
        return [*chosen, Fetch(start=start, source=source, target=target, tokens=tokens, names=names)]

    def begin(self, start: Start) -> list[Command]:
        """Start a request with the KV that its host has, and release what other hosts have of it."""
        request_id, worker = start.request.id, self.workers.get(start.worker)
        if worker is None:
            return []  # it died while the KV was on its way: the coordinator starts the request elsewhere
        host, homes = worker.host, self.homes[request_id]
        others = sorted(homes - {host}) if homes != {host} else []
        homes.difference_update(others)
        groups = 1
        if isinstance(start, StartPrefill) and start.layer_groups > 1:
            groups = self.layers.groups(host, start.layer_groups)
        return [*(ToPool(other, ReleaseBlocks(request_id)) for other in others), Begin(start, host, groups)]

    def _best_source(self, start: Start, target: HostId) -> HostId:
        """Return the host that has most of the request; the target where no other has more."""
        homes = self.homes[start.request.id]
        if homes <= {target}:
            return target
        return max((target, *sorted(homes)), key=lambda host: tokens_at(self.pools, host, start))

    def stop(self, command: StopRequest) -> list[Command]:
        """Stop a request on its worker, or on its way there."""
        request_id = command.request_id
        dropped = RequestDropped(request_id, command.attempt, command.worker, preempted=False)
        waiting = self.by_pool.find(request_id)
        if waiting is not None and waiting.attempt == command.attempt:
            self.by_pool.forget(request_id)
            return [dropped]
        transfer = self.table.awaited(request_id)
        if transfer is None or transfer.start is None or transfer.start.attempt != command.attempt:
            return [ToWorker(command.worker, command)]
        return [*self._give_up(transfer), dropped]

    def _give_up(self, transfer: Transfer) -> list[Command]:
        """Await a transfer no longer. Blocks that a wire still reads or writes are freed when it has ended."""
        start, request_id, target = transfer.start, transfer.request.id, transfer.target
        assert start is not None, f"no start waits for the transfer of {request_id}"
        self.table.give_up(transfer)
        self.homes[request_id].discard(target)
        if target not in self.pools:
            return []
        dropped = RequestDropped(request_id, start.attempt, start.worker, preempted=False)
        # Released first, so that the pool grants it no more blocks.
        return [ToPool(target, ReleaseBlocks(request_id)), ToPool(target, dropped)]

    def release(self, request_id: RequestId) -> list[Command]:
        """End everything about a closed request."""
        if self.table.is_empty:
            return self.release_homes(request_id)
        self.table.streams.pop(request_id, None)
        return [*self.layers.call_off(request_id), Release(request_id)]

    def release_homes(self, request_id: RequestId) -> list[Command]:
        self.by_pool.forget(request_id)
        transfer = self.table.awaited(request_id)
        if transfer is not None:
            self.table.give_up(transfer)
        return [ToPool(host, ReleaseBlocks(request_id)) for host in sorted(self.homes.pop(request_id, ()))]

    def go_on(self, transfer: Transfer) -> list[Command]:
        """Start what waited; first with the rest of its KV, where this was sent ahead only in part."""
        start, target = transfer.start, transfer.target
        if isinstance(start, StartDecode) and target in self.pools:
            source = self._best_source(start, target)
            tokens = tokens_at(self.pools, source, start)
            if tokens > tokens_at(self.pools, target, start):
                names = names_at(self.pools[source], self.pools[target], start.request, tokens)
                return [Fetch(start=start, source=source, target=target, tokens=tokens, names=names)]
        return self.begin_awaited(transfer)

    def begin_awaited(self, transfer: Transfer) -> list[Command]:
        assert transfer.start is not None, f"no start waits for the transfer of {transfer.request.id}"
        return self.begin(transfer.start)
