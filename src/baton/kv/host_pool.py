"""The metadata of one host's arena as one pure state machine: events of requests and workers in, grants out.

Blocks are pinned by requests, never by workers. A *holding* is what one request has on this host. Its blocks are freed
when two things are true: nobody will go on with the request (`ReleaseBlocks`), and no worker can still touch them (the
worker said so, or is dead). When blocks are short, the request that arrived first is served first and the one that
arrived last is preempted, whichever worker runs it: so the oldest request always gets on, and nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from baton.core.messages import (
    BlocksGranted,
    BlocksRemoved,
    BlocksSealed,
    BlocksStored,
    BlocksWanted,
    PoolCommand,
    PoolEvent,
    PreemptRequest,
    PrefillFinished,
    ReleaseBlocks,
    RequestDropped,
    RequestFailed,
    RequestFinished,
    StartDecode,
    StartPrefill,
    ToWorker,
    WorkerLost,
)
from baton.core.types import BlockHash, BlockId, HostId, HostView, Request, RequestId, WorkerId
from baton.kv.blocks import Blocks, EvictionOrder


@dataclass(slots=True)
class Holding:
    """What one request has on this host, and who may touch it."""

    request: Request
    attempt: int
    user: WorkerId | None
    """The worker that may read and write the blocks now. None between two workers."""
    table: list[BlockId] = field(default_factory=list[BlockId])
    computed_tokens: int = 0
    """Leading tokens whose KV is certainly in the table: sealed blocks, and a tail that a living worker vouched for."""
    wanted: int = 0
    """How long the table shall become. Equal to its length, or less, where nothing is wanted."""
    prefix: tuple[BlockHash, ...] = ()
    released: bool = False
    preempting: bool = False

    @property
    def age(self) -> tuple[int, float, RequestId]:
        """Less is served first and preempted last. The id breaks ties, so that every run decides alike."""
        return (self.request.priority, self.request.arrived_at_s, self.request.id)


class HostPool:
    """Who holds which block of one host. `handle` is the only way in; a driver carries the commands to the workers."""

    def __init__(
        self, *, host: HostId, blocks_total: int, block_tokens: int, eviction: Callable[[], EvictionOrder]
    ) -> None:
        self.host = host
        self.block_tokens = block_tokens
        self._blocks = Blocks(blocks_total, eviction())
        self._holdings: dict[RequestId, Holding] = {}
        self._wanting: dict[RequestId, None] = {}

    def handle(self, event: PoolEvent) -> list[PoolCommand]:
        """Apply one event and return what follows from it. Late and repeated events change nothing."""
        match event:
            case StartPrefill() | StartDecode():
                self._assign(event)
            case BlocksSealed():
                return self._seal(event)
            case BlocksWanted():
                self._want(event)
            case PrefillFinished(computed_tokens=computed_tokens):
                holding = self._current(event)
                if holding is not None:
                    holding.computed_tokens = computed_tokens
                    self._leave(holding)
            case RequestDropped():
                self._drop(event)
            case RequestFinished() | RequestFailed():
                holding = self._current(event)
                if holding is not None:
                    self._leave(holding)
            case ReleaseBlocks(request_id=request_id):
                self._release(request_id)
            case WorkerLost(worker=worker):
                for holding in [held for held in self._holdings.values() if held.user == worker]:
                    self._leave(holding)
            case _:
                assert_never(event)
        return self._serve()

    def table(self, request_id: RequestId) -> tuple[tuple[BlockId, ...], int]:
        """Return the request's block table and how many leading tokens of KV it holds: where a worker goes on."""
        holding = self._holdings.get(request_id)
        return (tuple(holding.table), holding.computed_tokens) if holding is not None else ((), 0)

    def view(self) -> HostView:
        """Count the blocks by state."""
        return HostView(
            id=self.host,
            blocks_total=self._blocks.total,
            blocks_free=self._blocks.free,
            blocks_used=self._blocks.used,
            blocks_cached=self._blocks.cached,
        )

    def blocks_of(self, worker: WorkerId) -> int:
        """Count the blocks that the worker's requests stand on; one that two of them share counts twice."""
        return sum(len(held.table) for held in self._holdings.values() if held.user == worker)

    @property
    def holders(self) -> int:
        """Requests that this pool knows."""
        return len(self._holdings)

    def check(self) -> None:
        """Assert that every pin belongs to a request and no block is lost (INV-2, INV-4)."""
        pins = [0] * self._blocks.total
        for holding in self._holdings.values():
            assert not (holding.released and holding.user is None), (
                f"{holding.request.id} is over and still holds blocks"
            )
            for block in holding.table:
                pins[block] += 1
        self._blocks.check(pins)

    def _assign(self, event: StartPrefill | StartDecode) -> None:
        holding = self._holdings.get(event.request.id)
        if holding is None:
            self._holdings[event.request.id] = Holding(event.request, event.attempt, event.worker)
            return
        again = isinstance(event, StartPrefill) and event.request.sampling.prompt_logprobs
        if holding.preempting or again:
            # A dead worker cannot answer any more, and what it had found out about the prompt died with it.
            self._empty(holding)
        holding.attempt, holding.user = event.attempt, event.worker
        holding.wanted = 0

    def _current(
        self, event: BlocksWanted | RequestDropped | PrefillFinished | RequestFinished | RequestFailed | BlocksSealed
    ) -> Holding | None:
        """Return the holding that the event speaks of; None where it is news of an abandoned attempt."""
        holding = self._holdings.get(event.request_id)
        if holding is None or holding.attempt != event.attempt or holding.user != event.worker:
            return None
        return holding

    def _want(self, event: BlocksWanted) -> None:
        holding = self._current(event)
        if holding is None or holding.released:
            return
        holding.wanted = event.blocks
        holding.prefix = event.prefix
        self._wanting[event.request_id] = None

    def _seal(self, event: BlocksSealed) -> list[PoolCommand]:
        holding = self._current(event)
        if holding is None:
            return []
        sealed = zip(holding.table[event.first :], event.hashes, strict=False)
        stored = tuple(name for block, name in sealed if self._blocks.seal(block, name))
        holding.computed_tokens = (event.first + len(event.hashes)) * self.block_tokens
        return [BlocksStored(self.host, stored)] if stored else []

    def _drop(self, event: RequestDropped) -> None:
        holding = self._current(event)
        if holding is None:
            return
        if event.preempted:
            self._empty(holding)
        else:
            self._leave(holding)

    def _leave(self, holding: Holding) -> None:
        """No worker touches the holding any more."""
        holding.user = None
        holding.wanted = 0
        if holding.released:
            self._free(holding)
        elif holding.preempting:
            self._empty(holding)

    def _release(self, request_id: RequestId) -> None:
        holding = self._holdings.get(request_id)
        if holding is None:
            return
        holding.released = True
        holding.wanted = 0
        if holding.user is None:
            self._free(holding)

    def _free(self, holding: Holding) -> None:
        self._empty(holding)
        del self._holdings[holding.request.id]

    def _empty(self, holding: Holding) -> None:
        self._blocks.unpin(holding.table)
        holding.table = []
        holding.computed_tokens = 0
        holding.wanted = 0
        holding.preempting = False

    def _serve(self) -> list[PoolCommand]:
        """Grant what can be granted, oldest request first; growth of running requests before new ones."""
        if not self._wanting:
            return []
        commands: list[PoolCommand] = []
        waiting = [held for key in self._wanting if (held := self._holdings.get(key)) and held.wanted > len(held.table)]
        waiting.sort(key=lambda held: held.age)
        short = False
        for holding in (held for held in waiting if held.table and not held.preempting):
            if not self._grow(holding, commands):
                short = True
                break
        for holding in (held for held in waiting if not held.table):
            if short or not self._open(holding, commands):
                break
        self._wanting = {
            held.request.id: None
            for held in waiting
            if held.wanted > len(held.table) and held.request.id in self._holdings
        }
        return commands

    def _grow(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        missing = holding.wanted - len(holding.table)
        while missing > self._blocks.available:
            if not self._preempt_youngest(missing, commands):
                return False
        self._take(holding, missing, commands)
        return True

    def _open(self, holding: Holding, commands: list[PoolCommand]) -> bool:
        """Give a request its first blocks: the prefix that is here, and room for the rest of what it wants.

        Keeps one block in reserve for each request that already runs, so that a newcomer does not cause a preemption.
        """
        hit = self._blocks.match(holding.prefix)
        running = sum(1 for held in self._holdings.values() if held.table)
        missing = holding.wanted - len(hit)
        if missing + self._blocks.unpinned(hit) + running > self._blocks.available:
            return False
        self._blocks.pin(hit)
        holding.table = hit
        holding.computed_tokens = len(hit) * self.block_tokens
        self._take(holding, missing, commands, cached_blocks=len(hit))
        return True

    def _take(self, holding: Holding, count: int, commands: list[PoolCommand], *, cached_blocks: int = 0) -> None:
        taken, evicted = self._blocks.take(count)
        holding.table = [*holding.table, *taken]
        if evicted:
            commands.append(BlocksRemoved(self.host, tuple(evicted)))
        assert holding.user is not None, f"{holding.request.id} is granted blocks while no worker runs it"
        granted = BlocksGranted(holding.request.id, holding.attempt, tuple(holding.table), cached_blocks)
        commands.append(ToWorker(holding.user, granted))

    def _preempt_youngest(self, missing: int, commands: list[PoolCommand]) -> bool:
        """Make room by taking the youngest request's blocks. True where room was made at once.

        False: the room comes when a worker answers (it gives blocks back between two steps, never inside one).
        """
        coming = sum(len(held.table) for held in self._holdings.values() if held.preempting or held.released)
        if coming + self._blocks.available >= missing:
            return False
        victims = [held for held in self._holdings.values() if held.table and not held.preempting and not held.released]
        victim = max(victims, key=lambda held: held.age)
        if victim.user is None:
            self._empty(victim)
            return True
        victim.preempting = True
        commands.append(ToWorker(victim.user, PreemptRequest(victim.request.id, victim.attempt)))
        return False
