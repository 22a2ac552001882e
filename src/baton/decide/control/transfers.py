"""The state machine of all KV transfers of a cluster: between hosts, from tiers and through remote pools.

A request that starts on a host without its KV waits for a transfer. The sealed blocks of a running request may be sent
ahead to the host that will probably continue it. Prompt blocks in a tier are read if that is cheaper than computing.

`Transfers.handle` yields commands one by one, and continues after each was carried out with all its consequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import assert_never

from baton.core.copies import CopyEnded, LandingGranted, LandingRefused, LayersDone
from baton.core.messages import (
    AheadEnded,
    BatcherEvent,
    BlocksSealed,
    HostLost,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
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
from baton.core.tier_messages import FromTier, LoadEnded, PutEnded, ReadBackWanted
from baton.core.types import HostId, RequestId, WorkerId
from baton.decide.control.advice import Policies
from baton.decide.control.cluster_messages import BeginRequest, MachineSteps, PoolDecision, RequestQueued, ToPool
from baton.decide.control.host_pools import HostPools, PoolRules, take_home
from baton.decide.control.landings import Landings
from baton.decide.control.link_estimates import LinkEstimates
from baton.decide.control.pool_transfers import PoolHandoff, PoolTransfers
from baton.decide.control.prefix_handover import PrefixHandover
from baton.decide.control.second_copies import SecondCopies
from baton.decide.control.streams import ChunkTransfers, Streams
from baton.decide.control.tier_reads import TierReads
from baton.decide.control.transfer import ChunkTransfer, Commands, Start, Steps, Transfer, TransferEvent, TransferTable


class Transfers:
    """Owns all transfers, and the hosts with their pools."""

    def __init__(self, policies: Policies, rules: PoolRules, steps: MachineSteps | None = None) -> None:
        """`steps`: a list that records the events and commands of the pools, for tests."""
        self.hosts = HostPools(rules)
        self.links = LinkEstimates(pools=self.hosts.pools, cost=policies.cost)
        self.table = TransferTable()
        self.tier_reads = TierReads(self.hosts, policies.cost)
        self._landings = Landings(self.hosts, self.table)
        self._chunks = ChunkTransfers(self.hosts, self.table)
        self._streams = Streams(self.hosts, self.table, self._chunks)
        self.handover = PrefixHandover(self.hosts, self.table)
        self._copies = SecondCopies(self.hosts, self.table)
        self._by_pool = PoolTransfers(self.hosts, self.table, self.links, policies)
        self._held: dict[RequestId, tuple[Start, HostId]] = {}
        """Starts that wait for a read ahead, with the host of the read."""
        self._steps = steps
        self._now_s = 0.0

    @property
    def waiting_for_pools(self) -> tuple[RequestId, ...]:
        """Requests that wait for a remote pool, or are streamed into one."""
        return (*self._by_pool.requests, *self._held)

    def handle(self, event: TransferEvent, now_s: float) -> Commands:
        """Apply one event and return the resulting commands. Late and repeated events have no effect."""
        self._now_s = now_s
        match event:  # in order of frequency, because a failed `isinstance` of a Struct costs as much as a short call
            case StartPrefill() | StartDecode():
                return self._start(event)
            case ReleaseBlocks(request_id=request_id):
                return self._release(request_id)
            case LandingGranted():
                return self._granted(event)
            case CopyEnded():
                return self._copy_ended(event)
            case SendAhead():
                return self._send_ahead(event)
            case LayersDone():
                return self._streams.layers_done(event)
            case FromTier():
                return self._tier_moved(event)
            case StopRequest():
                return self._stop(event)
            case LandingRefused(host=host, request_id=request_id):
                refused = self.table.refuse(request_id, host)  # sent or read ahead: it ends without free blocks
                return self._continue_ahead(refused, landed=False)
            case PutEnded():
                return self._hand_off_rest(self._by_pool.put_ended(event))
            case ReadBackWanted():
                return (ToPool(event.host, self.tier_reads.swap_in(event, self.table.next_number())),)
            case WorkerJoined() | WorkerLost():
                return self._change_workers(event)
            case HostLost():
                return self._lose_host(event)
            case _:
                assert_never(event)

    def handle_batcher_event(self, host: HostId, event: BatcherEvent, now_s: float) -> Commands:
        """Pass a worker's event to the pool of its host, and copy what the worker has computed."""
        self._now_s = now_s
        copies = self._chunks.computed(host, event) if isinstance(event, PrefillFinished) else ()
        is_alone = not copies and not isinstance(event, BlocksSealed)
        return self.tell_pool(host, event) if is_alone else self._copy_computed(copies, host, event)

    def _copy_computed(self, layers: Commands, host: HostId, event: BatcherEvent) -> Steps[None]:
        yield from layers  # before the event, after which the pool may release their blocks
        yield from self.tell_pool(host, event)
        if isinstance(event, BlocksSealed):
            yield from self._streams.sealed(event.request_id)
            yield from self._by_pool.sealed(event.request_id)
            yield from self._copies.sealed(event.request_id)

    def settle(self, request_id: RequestId) -> Commands:
        """End a chunk's transfer if no copy is under way. Call it after the coordinator handled the prompt's end."""
        return self._chunk_ended(self._chunks.settle(request_id))

    def tell_pool(self, host: HostId, event: PoolEvent) -> Sequence[PoolCommand]:
        """Pass an event to a host's pool. Return its commands."""
        commands = self.hosts.pools[host].handle(event)
        if self._steps is not None:
            self._steps.append(PoolDecision(self._now_s, host, event, tuple(commands)))
        return commands

    # ---- requests start on workers, each after the transfer of its KV

    def _start(self, start: Start) -> Commands:
        """Start a request after the transfer of its KV, if it needs one. A transfer under way may serve the start."""
        request_id = start.request.id
        self.hosts.homes.setdefault(request_id, set())
        self._forget_pool(request_id)  # an abandoned attempt may still wait there
        chunk = self._streams.stop(request_id)
        if chunk is None and self.table.is_empty:
            return self._place(start)
        return self._start_after(start, chunk)

    def _start_after(self, start: Start, chunk: ChunkTransfer | None) -> Steps[None]:
        """Start a request after a transfer that is under way. `chunk`: one that has just ended."""
        request_id = start.request.id
        yield from self._chunk_ended(chunk)
        worker, transfer = self.hosts.workers.get(start.worker), self.table.awaited.get(request_id)
        target = worker.host if worker is not None else None
        if transfer is not None and transfer.target != target:
            yield from self._give_up(transfer)
            transfer = None
        transfer = transfer or (self.table.revive(request_id, target) if target is not None else None)
        if transfer is not None and target is not None:
            transfer.start = start
            self.hosts.homes[request_id].add(target)
            yield ToPool(target, start)
            yield from self.settle(request_id)
        else:
            yield from self._place(start)

    def _place(self, start: Start) -> Commands:
        """Begin a transfer for a start if it needs one; otherwise start the request at once."""
        request_id, worker = start.request.id, self.hosts.workers.get(start.worker)
        if worker is None:
            return ()  # the worker died while the request waited: the coordinator starts the request elsewhere
        target, homes = worker.host, self.hosts.homes[request_id]
        if (request_id, target) in self.table.reads_ahead:
            self._held[request_id] = start, target
            return ()
        source = start.fetch if isinstance(start, StartPrefill) else self.hosts.best_source(start, target)
        homes.add(target)
        tokens = self.tier_reads.tokens_for_start(start, target=target, source=source)
        if tokens:
            return self._landings.begin(start, target, target, tokens)
        if source is not None and source != target and (tokens := self.hosts.tokens_at(source, start)):
            return self._bring(start, source, target, tokens)
        return self._begin(start)

    def _bring(self, start: Start, source: HostId, target: HostId, tokens: int) -> Steps[None]:
        """Hand a decode off through a pool if the policy chooses it; otherwise copy the KV from its source."""
        if isinstance(start, StartDecode) and (yield from self._by_pool.hand_off(start, source, target, self._now_s)):
            return
        self.hosts.homes[start.request.id].add(source)
        yield from self._landings.begin(start, source, target, tokens)

    def _begin(self, start: Start) -> Commands:
        """Start a request with the KV on its host, after its blocks were released on all other hosts."""
        worker = self.hosts.workers.get(start.worker)
        if worker is None:
            return ()  # the worker died during the transfer: the coordinator starts the request elsewhere
        others = take_home(self.hosts.homes[start.request.id], worker.host)
        return self._begin_alone(start, worker.host, others) if others else self._begin_on(start, worker.host)

    def _begin_alone(self, start: Start, host: HostId, others: Sequence[HostId]) -> Steps[None]:
        for other in others:
            yield ToPool(other, ReleaseBlocks(start.request.id))
        yield from self._begin_on(start, host)

    def _begin_on(self, start: Start, host: HostId) -> Commands:
        """Start a request on its host. It begins before further commands of its pool are carried out."""
        request = start.request
        self._copies.begin(start, host)
        commands = self.tell_pool(host, start)
        table, computed_tokens = self.hosts.pools[host].table(request.id)
        begin = BeginRequest(
            worker=start.worker, request_id=request.id, attempt=start.attempt,
            until=start.until if isinstance(start, StartPrefill) else "end",
            block_table=table, computed_tokens=computed_tokens,
            layer_groups=self._streams.groups(host, start.layer_groups) if isinstance(start, StartPrefill) else 1,
        )  # fmt: skip
        if isinstance(start, StartPrefill) and start.attempt == 1:
            return (begin, RequestQueued(request, has_blocks=bool(table)), *commands)
        return (begin, *commands)

    # ---- requests run, move and close

    def _send_ahead(self, command: SendAhead) -> Steps[None]:
        """Begin to send the sealed blocks of a running request to the host that will probably continue it."""
        target = self.hosts.workers[command.worker].host
        if command.source == target:
            return
        if command.report or not (yield from self._by_pool.stream(command, target, self._now_s)):
            yield from self._streams.begin(command, target)

    def _stop(self, command: StopRequest) -> Steps[None]:
        """Stop a request on its worker. If it waits for a transfer, end the transfer instead."""
        request_id, held = command.request_id, self._held.get(command.request_id)
        waiting = self._by_pool.start_of(request_id) or (held[0] if held is not None else None)
        transfer = self.table.awaited.get(request_id)
        if waiting is not None and waiting.attempt == command.attempt:
            self._forget_pool(request_id)
        elif transfer is not None and transfer.start is not None and transfer.start.attempt == command.attempt:
            yield from self._give_up(transfer)
        else:
            yield ToWorker(command.worker, command)
            return
        yield RequestDropped(request_id, command.attempt, command.worker, preempted=False)

    def _release(self, request_id: RequestId) -> Steps[None]:
        """Release a closed request on every host, and give up its transfers."""
        yield from self._chunk_ended(self._streams.stop(request_id))
        self._forget_pool(request_id)
        transfer = self.table.awaited.get(request_id)
        if transfer is not None:
            self.table.give_up(transfer)
        self._copies.close(request_id)
        for host in sorted(self.hosts.homes.pop(request_id, ())):
            yield ToPool(host, ReleaseBlocks(request_id))

    def _forget_pool(self, request_id: RequestId) -> None:
        """Give up the put and the stream of a request, and let no start of it wait for a read ahead."""
        self._held.pop(request_id, None)
        self._by_pool.forget(request_id)

    def _give_up(self, transfer: Transfer) -> Steps[None]:
        """Give up a transfer that a start waits for. Blocks that a copy still uses are freed after its end."""
        start, request_id, target = transfer.start, transfer.request.id, transfer.target
        assert start is not None, f"no start waits for the transfer of {request_id}"
        self.table.give_up(transfer)
        self.hosts.homes[request_id].discard(target)
        if target in self.hosts.pools:
            # The release comes first, so that the pool grants the request no further blocks.
            yield ToPool(target, ReleaseBlocks(request_id))
            yield ToPool(target, RequestDropped(request_id, start.attempt, start.worker, preempted=False))

    # ---- hosts and workers are lost

    def _change_workers(self, event: WorkerJoined | WorkerLost) -> Steps[None]:
        if isinstance(event, WorkerJoined):
            self.hosts.workers[event.view.id] = event.view
            self.links.joined(event.view)
            return
        view = self.hosts.workers.pop(event.worker, None)
        if view is not None:
            yield from self.tell_pool(view.host, event)
        yield from self._lose_chunks(event.worker)

    def _lose_chunks(self, lost: WorkerId | HostId) -> Steps[None]:
        for request_id in self._chunks.requests_on(lost):
            yield from self._chunk_ended(self._chunks.call_off(request_id))

    def _lose_host(self, lost: HostLost) -> Steps[None]:
        """End the transfers of a lost host. In between, the coordinator starts its requests on other hosts."""
        host = lost.host
        self.hosts.lose(host)
        self.table.lose_host(host)
        self._copies.lose_host(host)
        moving = self._streams.lose_host(host)
        self.links.lose_host(host)
        yield from self._lose_chunks(host)
        yield lost
        for stream in moving:  # without this event, the request would count as moving until its end
            yield AheadEnded(stream.request.id, stream.attempt, landed=False)
        for handoff in self._by_pool.lose_host(host):
            yield from self._hand_off_rest(handoff)

    # ---- a transfer gets blocks, and ends

    def _granted(self, granted: LandingGranted) -> Steps[None]:
        """Copy or read the blocks that the target lacks. A transfer without such blocks ends at once."""
        transfer = self.table.land(granted.request_id, granted.host)
        if isinstance(transfer, ChunkTransfer):
            yield from self._chunks.land(transfer, granted)
        elif not (yield from self._landings.fill(transfer, granted)):
            yield from self._ended(transfer, blocks=0, landed=True)

    def _copy_ended(self, end: CopyEnded) -> Steps[None]:
        """Continue the transfer, or the chunk transfer, that an ended copy belongs to."""
        self.links.copy_ends(end, self._now_s)
        if self._chunks.has_copy(end.number):
            yield from self._chunk_ended(self._chunks.copy_ended(end))
        elif (transfer := self.table.find(end.number, end.request_id)) is not None:
            yield from self._ended(transfer, blocks=None if end.landed else 0, landed=end.landed)

    def _tier_moved(self, event: FromTier) -> Steps[None]:
        """Pass an event of a tier to its pool, then continue the transfers that waited for it."""
        host, ended = event.host, event.event
        # The swap-in of a preempted request belongs to no transfer: its pool alone handles the end.
        transfer = self.table.find(ended.number, ended.request_id) if isinstance(ended, LoadEnded) else None
        grown = self.links.tier_work_ends(host, ended, self._now_s)
        if host in self.hosts.pools:
            yield ToPool(host, ended)
            if grown is not None:
                yield from self._by_pool.tier_grew(grown)
        if isinstance(ended, LoadEnded) and transfer is not None:
            blocks = sum(takewhile(bool, ended.whole))  # blocks after the first missing one are recomputed
            yield from self._ended(transfer, blocks=blocks, landed=blocks == len(ended.whole))

    def _ended(self, transfer: Transfer, *, blocks: int | None, landed: bool) -> Steps[None]:
        """End a transfer. `blocks`: leading blocks that were written; None: all."""
        pool = self.hosts.pools.get(transfer.target)
        tokens = transfer.tokens if pool is not None else 0
        if pool is not None and blocks is not None:
            tokens = min(tokens, transfer.cached_tokens + blocks * pool.block_tokens)
        yield from self._over(transfer, tokens, landed=landed and not transfer.is_too_late)

    def _chunk_ended(self, chunk: ChunkTransfer | None) -> Commands:
        """End the transfer of a chunk. Does nothing for None: there is no chunk, or a copy of it is under way."""
        if chunk is None:
            return ()
        tokens = 0 if chunk.has_failed else chunk.tokens  # a recomputed prompt must still compute its last token
        if tokens and not isinstance(chunk.start, StartDecode) and chunk.target in self.hosts.pools:
            block_tokens = self.hosts.pools[chunk.target].block_tokens
            tokens = (chunk.request.prompt_tokens - 1) // block_tokens * block_tokens
        return self._over(chunk, tokens, landed=not chunk.has_failed)

    def _over(self, transfer: Transfer, tokens: int, *, landed: bool) -> Steps[None]:
        """End a transfer of which `tokens` are at the target, and continue the requests that waited for it."""
        tokens = max(tokens, transfer.cached_tokens)
        is_awaited = yield from self._landings.end(transfer, tokens, landed=landed)
        is_whole = tokens >= transfer.tokens if transfer.is_read_ahead else landed
        yield from self._continue_ahead(transfer, landed=is_whole)
        if is_awaited:
            yield from self._go_on(transfer)

    def _go_on(self, transfer: Transfer) -> Steps[None]:
        """Start the request after its transfer. If the KV was sent ahead only in part, copy the rest first."""
        start, target = transfer.start, transfer.target
        assert start is not None, f"no start waits for the transfer of {transfer.request.id}"
        if transfer.state == "landed" and isinstance(start, StartDecode) and target in self.hosts.pools:
            source = self.hosts.best_source(start, target)
            if (tokens := self.hosts.tokens_at(source, start)) > self.hosts.tokens_at(target, start):
                yield from self._landings.begin(start, source, target, tokens)
                return
        yield from self._begin(start)

    def _continue_ahead(self, transfer: Transfer, *, landed: bool) -> Steps[None]:
        """Continue the work that waited for a transfer: a stream; for a read from tiers, a start or a pool handoff."""
        held = self._held.get(transfer.request.id)
        if self._copies.ended(transfer, landed=landed) or (yield from self.handover.ended(transfer)):
            return
        if not transfer.is_read_ahead:
            yield from self._streams.transfer_ended(transfer, landed=landed)
        elif held is not None and held[1] == transfer.target:
            del self._held[transfer.request.id]
            yield from self._place(held[0])
        else:
            yield from self._hand_off_rest((yield from self._by_pool.read_over(transfer, is_whole=landed)))

    def _hand_off_rest(self, handoff: PoolHandoff | None) -> Steps[None]:
        """Read a handoff's blocks from the pool. If some are missing, copy directly from the source if it is live."""
        start = handoff.start if handoff is not None else None
        worker = self.hosts.workers.get(start.worker) if start is not None else None
        if handoff is None or start is None or worker is None or worker.host != handoff.target:
            return  # the target's worker has died: the coordinator starts the request elsewhere
        source, target, hashes = handoff.source, handoff.target, handoff.hashes
        if self.hosts.reachable_blocks(target, hashes) == len(hashes):
            if source in self.hosts.pools:  # its blocks are cached from now on
                self.hosts.homes[start.request.id].discard(source)
                yield ToPool(source, ReleaseBlocks(start.request.id))
            tokens = len(hashes) * self.hosts.pools[target].block_tokens
            yield from self._landings.begin(start, target, target, tokens, hashes)
            return
        tokens = self.hosts.tokens_at(source, start)
        if not tokens:
            source, tokens = target, self.tier_reads.tokens_for_start(start, target=target, source=None)
        yield from self._landings.begin(start, source, target, tokens) if tokens else self._begin(start)
