"""What the carrier of a simulation reaches: simulated workers and wires, and the life of every request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.copies import CopyBlocks
from baton.core.keeping import DropBlocks, LoadBlocks, StoreBlocks
from baton.core.messages import (
    BlocksGranted,
    CloseRequest,
    RetireWorker,
    SetRole,
    StartDecode,
    StartRequest,
    StartWorker,
    WorkerCommand,
)
from baton.core.types import RequestId, TokenBytes, WorkerId
from baton.decide.control.handoffs import Start
from baton.decide.control.load_meter import LoadMeter
from baton.lab.sim.journal import Journal, Life
from baton.lab.sim.loop import EventLoop


@dataclass(slots=True, kw_only=True)
class SimOutside:
    """Implements `Outside`."""

    loop: EventLoop
    journal: Journal
    block_tokens: Callable[[WorkerId], int]
    """Tokens in a block of a worker's host."""
    closed: Callable[[Life], None]
    """Called when a request has closed."""
    reshape_fleet: Callable[[SetRole | StartWorker | RetireWorker], None]
    """Changes the fleet as roles and scaling ask."""
    start_copy: Callable[[CopyBlocks], None]
    """Puts a copy on the wire."""
    start_keeping: Callable[[StoreBlocks | DropBlocks | LoadBlocks], None]
    """Has a store write, read or forget."""
    meter: LoadMeter = field(default_factory=LoadMeter)
    routes: dict[WorkerId, Callable[[WorkerCommand], None]] = field(
        default_factory=dict[WorkerId, Callable[[WorkerCommand], None]]
    )
    """The link to every worker that has joined and is not lost."""

    def send(self, worker: WorkerId, command: WorkerCommand) -> None:
        """See `Outside.send`."""
        if isinstance(command, StartRequest):
            if command.block_table:
                self._note_hit(command.request.id, command.computed_tokens)
        elif isinstance(command, BlocksGranted):
            self._note_hit(command.request_id, command.cached_blocks * self.block_tokens(worker))
        route = self.routes.get(worker)
        if route is not None:
            route(command)

    def copy(self, copy: CopyBlocks) -> None:
        """See `Outside.copy`."""
        self.start_copy(copy)

    def keep(self, command: StoreBlocks | DropBlocks | LoadBlocks) -> None:
        """See `Outside.keep`."""
        self.start_keeping(command)

    def assign(self, command: Start) -> TokenBytes:
        """See `Outside.assign`."""
        life = self.journal.lives[command.request.id]
        life.attempt, life.worker = command.attempt, command.worker
        if isinstance(command, StartDecode):
            life.handoffs_s += (self.loop.now_s,)
        elif command.until == "prompt":
            life.leaves_first_token = True
        return TokenBytes(life.tokens.tobytes())

    def close(self, command: CloseRequest) -> None:
        """See `Outside.close`."""
        life = self.journal.lives[command.request_id]
        life.closes += ((self.loop.now_s, command),)
        times_s = life.token_times_s
        decode_s = times_s[-1] - times_s[0] if times_s else 0.0
        self.meter.closed(command.outcome, output_tokens=len(times_s), decode_s=decode_s)
        self.closed(life)

    def reshape(self, command: SetRole | StartWorker | RetireWorker) -> None:
        """See `Outside.reshape`."""
        self.reshape_fleet(command)

    def _note_hit(self, request_id: RequestId, tokens: int) -> None:
        life = self.journal.lives.get(request_id)
        if life is not None and life.cached_tokens is None:
            life.cached_tokens = tokens
