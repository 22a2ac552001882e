"""Carries events and commands between the coordinator, the host pools, the workers and the wires between hosts.

The live server and the simulator both drive this object: what differs between them stands behind `Outside`. It decides
nothing; it keeps the order. A pool hears of an assignment before the worker does, and of what a worker has said before
the coordinator does; everything that follows from an event is carried out before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from baton.control.coordinator import Coordinator
from baton.control.decision_log import Decision, PoolDecision
from baton.control.handoffs import Handoffs, Move, Start
from baton.core.copies import CopyBlocks, LandingEnded, LandingGranted, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.messages import (
    BlocksRemoved,
    BlocksStored,
    CloseRequest,
    CoordinatorCommand,
    CoordinatorEvent,
    HostLost,
    PoolCommand,
    PoolEvent,
    PrefillFinished,
    ReleaseBlocks,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    RetireWorker,
    RoleSet,
    SetRole,
    StartDecode,
    StartPrefill,
    StartRequest,
    StartWorker,
    StepReport,
    StopRequest,
    Tick,
    ToWorker,
    WorkerCommand,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from baton.core.types import BlockId, HostId, LoadWindow, Request, RequestId, Role, TokenBytes, WorkerId, WorkerView
from baton.kv.host_pool import HostPool


class Outside(Protocol):
    """What a carrier cannot do itself: reach processes, wires and clients."""

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """Pass a command on. To a worker that has died it goes nowhere: its loss is reported on its own."""
        ...

    def copy(self, copy: CopyBlocks) -> None:
        """Begin to copy blocks between two hosts. `Carrier.copied` is called once for it, however it ends."""
        ...

    def assign(self, command: Start) -> TokenBytes:
        """Note who has the request now, and return its tokens so far: the server holds the truth about them."""
        ...

    def close(self, command: CloseRequest) -> None:
        """Tell the client how its request ended."""
        ...

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """Change the fleet."""
        ...


class Carrier:
    """The machines of one cluster, wired together. Calls must not be nested, except through `Outside.close`."""

    def __init__(self, coordinator: Coordinator, outside: Outside) -> None:
        self.coordinator = coordinator
        self.pools: dict[HostId, HostPool] = {}
        self.log: Callable[[Decision | PoolDecision], None] | None = None
        """Called with every decision of the coordinator and of a pool."""
        self._outside = outside
        self._hosts: dict[WorkerId, HostId] = {}
        self._homes: dict[RequestId, set[HostId]] = {}
        """Hosts whose pool knows the request."""
        self._handoffs = Handoffs()
        self._now_s = 0.0

    @property
    def handoffs(self) -> tuple[Move, ...]:
        """Handoffs between hosts that are under way."""
        return tuple(self._handoffs)

    # ---- what clients and operators do

    def arrive(self, request: Request, now_s: float) -> None:
        self._now_s = now_s
        self._tell(RequestArrived(request))

    def cancel(self, request_id: RequestId, now_s: float) -> None:
        self._now_s = now_s
        self._tell(RequestCancelled(request_id))

    def set_role(self, worker: WorkerId, role: Role, now_s: float) -> None:
        self._now_s = now_s
        self._tell(RoleSet(worker, role))

    def tick(self, window: LoadWindow, now_s: float) -> None:
        self._now_s = now_s
        self._tell(Tick(window))

    # ---- what happens to hosts and workers

    def add_host(self, pool: HostPool) -> None:
        """Know of a host's arena. Its workers may join from now on."""
        self.pools[pool.host] = pool

    def join(self, view: WorkerView, now_s: float) -> None:
        self._now_s = now_s
        self._hosts[view.id] = view.host
        self._tell(WorkerJoined(view))

    def lose(self, worker: WorkerId, reason: str, now_s: float) -> None:
        """A worker's process is certainly dead: first its pool hears of it, then the coordinator."""
        self._now_s = now_s
        lost = WorkerLost(worker, reason)
        host = self._hosts.pop(worker, None)
        if host is not None:
            self._tell_pool(host, lost)
        self._tell(lost)

    def lose_host(self, host: HostId, reason: str, now_s: float) -> None:
        """A host is gone with its KV and its workers. Their requests go on elsewhere, from their tokens."""
        self._now_s = now_s
        self.pools.pop(host, None)
        self._handoffs.lose_target(host)
        for homes in self._homes.values():
            homes.discard(host)
        for worker in [worker for worker, where in self._hosts.items() if where == host]:
            del self._hosts[worker]
        self._tell(HostLost(host, reason))

    def hear(self, report: StepReport, now_s: float) -> None:
        """Take a worker's news, in their order, then its load. Its tokens are the caller's, before this."""
        self._now_s = now_s
        host = self._hosts.get(report.worker)
        for event in report.events:
            if host is not None:
                self._tell_pool(host, event)
            match event:
                case PrefillFinished() | RequestFinished() | RequestFailed():
                    self._tell(event)
                case RequestDropped(preempted=False):
                    self._tell(event)
                case _:
                    pass
        if report.is_load_new:
            self._tell(WorkerReported(report.view))

    def copied(self, copy: CopyBlocks, *, landed: bool, now_s: float) -> None:
        """A copy is over: nothing reads its source or writes its target any more."""
        self._now_s = now_s
        self._copied(copy, landed=landed)

    # ---- events in, commands out

    def _tell(self, event: CoordinatorEvent) -> None:
        commands = self.coordinator.handle(event, self._now_s)
        if self.log is not None:
            self.log(Decision(self._now_s, event, tuple(commands)))
        for command in commands:
            self._execute(command)

    def _execute(self, command: CoordinatorCommand) -> None:
        match command:
            case StartPrefill(fetch=source) | StartDecode(source=source):
                self._start(command, source)
            case StopRequest():
                self._stop(command)
            case ReleaseBlocks(request_id=request_id):
                self._release(request_id)
            case CloseRequest():
                self._outside.close(command)
            case SetRole() | StartWorker() | RetireWorker():
                self._outside.reshape(command)
            case _:
                assert_never(command)

    def _tell_pool(self, host: HostId, event: PoolEvent) -> None:
        self._carry(host, self._ask_pool(host, event))

    def _ask_pool(self, host: HostId, event: PoolEvent) -> list[PoolCommand]:
        commands = self.pools[host].handle(event)
        if self.log is not None:
            self.log(PoolDecision(self._now_s, host, event, tuple(commands)))
        return commands

    def _carry(self, host: HostId, commands: Iterable[PoolCommand]) -> None:
        for command in commands:
            match command:
                case ToWorker(worker=worker, command=inner):
                    self._outside.send(worker, inner)
                case BlocksStored() | BlocksRemoved():
                    self._tell(command)
                case LandingGranted():
                    self._copy(host, command)
                case _:
                    assert_never(command)

    def _release(self, request_id: RequestId) -> None:
        """The request is over: tell every host that knows it, and wait for no handoff of it."""
        move = self._handoffs.find(request_id)
        if move is not None:
            self._handoffs.stop(move)
        for host in sorted(self._homes.pop(request_id, ())):
            self._tell_pool(host, ReleaseBlocks(request_id))

    # ---- a request starts on a worker, with its KV or without

    def _start(self, command: Start, source: HostId | None) -> None:
        """Start a request where it is told to, after its KV has come over from where it is, if it is elsewhere."""
        tokens_so_far = self._outside.assign(command)
        request_id, target = command.request.id, self._hosts[command.worker]
        homes = self._homes.setdefault(request_id, set())
        if self._redirect(command, target, tokens_so_far):
            return
        if isinstance(command, StartDecode):
            source = max((target, *sorted(homes)), key=lambda host: self._tokens_at(host, command))
        homes.add(target)
        tokens = self._tokens_at(source, command)
        if source is None or source == target or tokens == 0:
            self._begin(command, tokens_so_far)
            return
        homes.add(source)
        self._handoffs.begin(command, tokens_so_far, source=source, target=target, tokens=tokens)
        blocks = -(-tokens // self._block_tokens)
        prefix = command.request.block_hashes[: tokens // self._block_tokens]
        self._tell_pool(target, LandingWanted(command.request, command.attempt, command.worker, blocks, prefix))

    def _redirect(self, command: Start, target: HostId, tokens_so_far: TokenBytes) -> bool:
        """Let a handoff under way serve this start, or give it up where it goes elsewhere. False: none goes there."""
        move = self._handoffs.find(command.request.id)
        if move is not None and move.target != target:
            self._give_up(move)
            move = None
        move = move or self._handoffs.revive(command.request.id, target)
        if move is None:
            return False
        move.start, move.tokens_so_far = command, tokens_so_far
        self._homes[command.request.id].add(target)
        self._tell_pool(target, command)
        return True

    def _begin(self, command: Start, tokens_so_far: TokenBytes) -> None:
        """Give the request's blocks to the worker and tell it so, before anything else that follows from it."""
        host = self._hosts[command.worker]
        self._leave_others(command.request.id, host)
        follow_up = self._ask_pool(host, command)
        table, computed_tokens = self.pools[host].table(command.request.id)
        start = StartRequest(
            request=command.request,
            attempt=command.attempt,
            tokens=tokens_so_far,
            until=command.until if isinstance(command, StartPrefill) else "end",
            block_table=table,
            computed_tokens=computed_tokens,
        )
        self._outside.send(command.worker, start)
        self._carry(host, follow_up)

    def _leave_others(self, request_id: RequestId, host: HostId) -> None:
        """The request goes on here: nobody will go on with what it holds on other hosts."""
        for home in sorted(self._homes[request_id] - {host}):
            self._homes[request_id].discard(home)
            self._tell_pool(home, ReleaseBlocks(request_id))

    def _tokens_at(self, source: HostId | None, command: Start) -> int:
        """Count the leading tokens of the request whose KV another host can give now."""
        pool = self.pools.get(source) if source is not None else None
        if pool is None:
            return 0
        request = command.request
        if isinstance(command, StartDecode):
            return pool.table(request.id)[1]
        if request.sampling.prompt_logprobs:
            return 0  # every prompt token has to be looked at
        return min(pool.held_tokens(request.block_hashes), request.prompt_tokens - 1)

    def _copy(self, target: HostId, granted: LandingGranted) -> None:
        """The blocks to land in are there: pin those to copy from, and begin."""
        request_id = granted.request_id
        move = self._handoffs.find(request_id)
        assert move is not None, f"{request_id} is granted blocks to land in, and nothing is under way"
        table: tuple[BlockId, ...] = ()
        move.tokens = min(move.tokens, self._tokens_at(move.source, move.start))
        if move.tokens:
            # Never the whole prompt: whoever goes on in these blocks computes its last token, and others read them.
            full_blocks = (move.request.prompt_tokens - 1) // self._block_tokens
            self._tell_pool(move.source, LeaseWanted(move.request, move.request.block_hashes[:full_blocks]))
            table, computed_tokens = self.pools[move.source].table(request_id)
            move.tokens = min(move.tokens, computed_tokens)
            move.is_leasing = True
        blocks = -(-move.tokens // self._block_tokens)
        move.cached_blocks = granted.cached_blocks
        move.is_copying = True
        copy = CopyBlocks(
            request_id=request_id,
            number=move.number,
            source=move.source,
            target=target,
            read=table[move.cached_blocks : blocks],
            write=granted.block_table[move.cached_blocks : blocks],
            tokens=max(0, move.tokens - move.cached_blocks * self._block_tokens),
        )
        if copy.read:
            self._outside.copy(copy)
        else:
            self._copied(copy, landed=True)

    def _copied(self, copy: CopyBlocks, *, landed: bool) -> None:
        move, waited_for = self._handoffs.end(copy)
        request_id = copy.request_id
        if move.source in self.pools and move.is_leasing:
            self._tell_pool(move.source, LeaseEnded(request_id))
        if move.target in self.pools:
            tokens = max(move.tokens if landed else 0, move.cached_blocks * self._block_tokens)
            names = move.request.block_hashes[: tokens // self._block_tokens]
            self._tell_pool(move.target, LandingEnded(request_id, tokens, names))
        if not waited_for:
            return
        if move.start.worker in self._hosts:
            self._begin(move.start, move.tokens_so_far)

    def _stop(self, command: StopRequest) -> None:
        """Stop a request on its worker, or on its way there."""
        move = self._handoffs.find(command.request_id)
        if move is None or move.start.attempt != command.attempt:
            self._outside.send(command.worker, command)
            return
        self._give_up(move)
        self._tell(RequestDropped(command.request_id, command.attempt, command.worker, preempted=False))

    def _give_up(self, move: Move) -> None:
        """Nobody waits for what this handoff brings. What a wire still reads or writes is freed when it has ended."""
        start, request_id = move.start, move.request.id
        self._handoffs.stop(move)
        self._homes[request_id].discard(move.target)
        if move.target in self.pools:
            dropped = RequestDropped(request_id, start.attempt, start.worker, preempted=False)
            self._tell_pool(move.target, ReleaseBlocks(request_id))  # first: nothing is granted to it any more
            self._tell_pool(move.target, dropped)

    @property
    def _block_tokens(self) -> int:
        return self.coordinator.block_tokens
