"""Starts of requests on workers, each after the transfer of its KV or at once with the KV on the worker's host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.messages import ReleaseBlocks, RequestDropped, StartDecode, StartPrefill, StopRequest, ToWorker
from baton.core.types import HostId, RequestId, WorkerId, WorkerView
from baton.decide.control.cluster_messages import ToPool
from baton.decide.control.kv_names import names_at, reachable_blocks, tokens_at
from baton.decide.control.landings import Landings
from baton.decide.control.layer_transfers import LayerTransfers
from baton.decide.control.pool_transfers import PoolTransfers
from baton.decide.control.tier_reads import TierReads
from baton.decide.control.transfer import Begin, PlannedHandoff, Start, Steps, Transfer, TransferTable
from baton.decide.kv.host_pool import HostPool


@dataclass(slots=True, kw_only=True)
class RequestStarts:
    """Chooses the source of the KV for every start, and starts the request after the transfer."""

    table: TransferTable
    pools: Mapping[HostId, HostPool]
    workers: Mapping[WorkerId, WorkerView]
    homes: dict[RequestId, set[HostId]]
    """Hosts whose pools know each request."""
    landings: Landings
    layers: LayerTransfers
    tiers: TierReads
    by_pool: PoolTransfers

    def redirect(self, start: Start) -> Steps[bool]:
        """Let a transfer under way serve a start, if it goes to the same host. Otherwise give it up.

        Return whether a transfer serves the start.
        """
        request_id, target = start.request.id, self.workers[start.worker].host
        transfer = self.table.awaited(request_id)
        if transfer is not None and transfer.target != target:
            yield from self._give_up(transfer)
            transfer = None
        transfer = transfer or self.table.revive(request_id, target)
        if transfer is None:
            return False
        transfer.start = start
        self.homes[request_id].add(target)
        yield ToPool(target, start)
        return True

    def place(self, start: Start, now_s: float) -> Steps[None]:
        """Begin a transfer for a start if it needs one; otherwise start the request at once."""
        request_id, worker = start.request.id, self.workers.get(start.worker)
        if worker is None:
            return  # it died while the request waited: the coordinator starts the request elsewhere
        target, homes = worker.host, self.homes[request_id]
        if self.by_pool.hold(start, target):
            return
        source = start.fetch if isinstance(start, StartPrefill) else self._best_source(start, target)
        homes.add(target)
        if (yield from self._read_tiers(start, target=target, source=source)):
            return
        tokens = tokens_at(self.pools, source, start) if source != target else 0
        if source is None or tokens == 0:
            yield from self.begin(start)
            return
        if isinstance(start, StartDecode):
            is_by_pool = yield from self.by_pool.hand_off(start, source=source, target=target, now_s=now_s)
            if is_by_pool:
                return
        homes.add(source)
        yield from self._fetch(start, source=source, target=target, tokens=tokens)

    def resume(self, ready: Start | PlannedHandoff | None, now_s: float) -> Steps[None]:
        """Continue a start that waited for a read ahead, or a handoff whose put has ended."""
        if isinstance(ready, PlannedHandoff):
            yield from self._hand_off_rest(ready)
        elif ready is not None:
            yield from self.place(ready, now_s)

    def go_on(self, transfer: Transfer) -> Steps[None]:
        """Start the request after its transfer. If the KV was sent ahead only in part, copy the rest first."""
        start, target = transfer.start, transfer.target
        assert start is not None, f"no start waits for the transfer of {transfer.request.id}"
        if transfer.state == "landed" and isinstance(start, StartDecode) and target in self.pools:
            source = self._best_source(start, target)
            tokens = tokens_at(self.pools, source, start)
            if tokens > tokens_at(self.pools, target, start):
                yield from self._fetch(start, source=source, target=target, tokens=tokens)
                return
        yield from self.begin(start)

    def begin(self, start: Start) -> Steps[None]:
        """Start a request with the KV on its host, and release its blocks on all other hosts."""
        request_id, worker = start.request.id, self.workers.get(start.worker)
        if worker is None:
            return  # it died while the KV was on its way: the coordinator starts the request elsewhere
        host, homes = worker.host, self.homes[request_id]
        others = sorted(homes - {host}) if homes != {host} else []
        homes.difference_update(others)
        groups = 1
        if isinstance(start, StartPrefill) and start.layer_groups > 1:
            groups = self.layers.groups(host, start.layer_groups)
        for other in others:
            yield ToPool(other, ReleaseBlocks(request_id))
        yield Begin(start, host, groups)

    def stop(self, command: StopRequest) -> Steps[None]:
        """Stop a request on its worker, or end the transfer that it waits for."""
        request_id = command.request_id
        waiting, transfer = self.by_pool.find(request_id), self.table.awaited(request_id)
        if waiting is not None and waiting.attempt == command.attempt:
            self.by_pool.forget(request_id)
        elif transfer is not None and transfer.start is not None and transfer.start.attempt == command.attempt:
            yield from self._give_up(transfer)
        else:
            yield ToWorker(command.worker, command)
            return
        yield RequestDropped(request_id, command.attempt, command.worker, preempted=False)

    def release(self, request_id: RequestId) -> Steps[None]:
        """Release a closed request on every host, and give up its transfers."""
        self.by_pool.forget(request_id)
        transfer = self.table.awaited(request_id)
        if transfer is not None:
            self.table.give_up(transfer)
        for host in sorted(self.homes.pop(request_id, ())):
            yield ToPool(host, ReleaseBlocks(request_id))

    def _hand_off_rest(self, planned: PlannedHandoff) -> Steps[None]:
        """Read a handoff's blocks from the pool. If some are missing, copy directly from the source if it is live."""
        start, source, names, target = planned.start, planned.source, planned.read.names, planned.read.target
        worker = self.workers.get(start.worker)
        if worker is None or worker.host != target:
            return  # its worker has died: the coordinator starts the request elsewhere
        if reachable_blocks(self.pools[target], names) == len(names):
            if source in self.pools:  # its blocks are cached from now on
                self.homes[start.request.id].discard(source)
                yield ToPool(source, ReleaseBlocks(start.request.id))
            tokens = len(names) * self.pools[target].block_tokens
            yield from self.landings.fetch(start, source=target, target=target, tokens=tokens, names=names)
            return
        tokens = tokens_at(self.pools, source, start)
        if tokens:
            yield from self._fetch(start, source=source, target=target, tokens=tokens)
        elif not (yield from self._read_tiers(start, target=target, source=None)):
            yield from self.begin(start)

    def _read_tiers(self, start: Start, *, target: HostId, source: HostId | None) -> Steps[bool]:
        """Begin a read from the target's tiers if that is worth it. Return whether it is."""
        tokens = self.tiers.worth_reading(start, target=target, source=source)
        if tokens:
            yield from self._fetch(start, source=target, target=target, tokens=tokens)
        return tokens > 0

    def _fetch(self, start: Start, *, source: HostId, target: HostId, tokens: int) -> Steps[None]:
        names = names_at(self.pools[source], self.pools[target], start.request, tokens)
        yield from self.landings.fetch(start, source=source, target=target, tokens=tokens, names=names)

    def _best_source(self, start: Start, target: HostId) -> HostId:
        """Return the host with the most KV of the request; the target on a tie."""
        homes = self.homes[start.request.id]
        if homes <= {target}:
            return target
        return max((target, *sorted(homes)), key=lambda host: tokens_at(self.pools, host, start))

    def _give_up(self, transfer: Transfer) -> Steps[None]:
        """Give up a transfer that a start waits for. Blocks that a copy still uses are freed after its end."""
        start, request_id, target = transfer.start, transfer.request.id, transfer.target
        assert start is not None, f"no start waits for the transfer of {request_id}"
        self.table.give_up(transfer)
        self.homes[request_id].discard(target)
        if target in self.pools:
            # The release comes first, so that the pool grants the request no further blocks.
            yield ToPool(target, ReleaseBlocks(request_id))
            yield ToPool(target, RequestDropped(request_id, start.attempt, start.worker, preempted=False))
