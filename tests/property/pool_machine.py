"""A host pool and its workers, who answer in any order: what the property tests of the pool play."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    RequestFinished,
    StartDecode,
    StartPrefill,
    ToWorker,
    WorkerLost,
)
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed

TOTAL = 8
BLOCK_TOKENS = 4
WORKERS = [WorkerId(f"w{number}") for number in range(3)]
workers = st.sampled_from(WORKERS)


def chain(stream: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(f"{stream}/{depth}".encode()) for depth in range(count))


@dataclass(slots=True)
class Part:
    """What the cluster knows of one request: its worker's own picture, fed by grants alone."""

    request: Request
    stream: int
    attempt: int = 1
    worker: WorkerId | None = None
    table: tuple[BlockId, ...] = ()
    sealed_blocks: int = 0
    asked: int = 0
    told_to_yield: bool = False
    closed: bool = False
    old: list[PoolEvent] = field(default_factory=list[PoolEvent], repr=False)
    """Everything that was ever said of it, to be said again when it is no longer true."""


class PoolUnderAnyOrder(RuleBasedStateMachine):
    request_blocks_max, is_granted_in_parts = 6, False

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.new_pool()
        self.parts: dict[RequestId, Part] = {}
        self.gone: list[PoolEvent] = []
        self.findable: set[BlockHash] = set()
        self.sealed: set[BlockId] = set()
        self.number = 0
        self.dying: WorkerId | None = None
        """Dead, and the pool has not heard of it: what it is sent goes nowhere."""

    def new_pool(self) -> HostPool:
        return HostPool(host=HostId("h"), blocks_total=TOTAL, block_tokens=BLOCK_TOKENS, eviction=LeastRecentlyUsed)

    def move(self, command: PoolCommand) -> None:
        raise AssertionError(f"{command} from a pool that has nothing below it")

    def tell(self, event: PoolEvent) -> None:
        """Handle one event and let the workers take what comes of it."""
        commands = self.pool.handle(event)
        for command in commands:
            match command:
                case BlocksStored(hashes=hashes):
                    assert not self.findable & set(hashes), "stored twice"
                    self.findable |= set(hashes)
                case BlocksRemoved(hashes=hashes):
                    assert self.findable >= set(hashes), "removed what was not there"
                    self.findable -= set(hashes)
                case ToWorker(worker=worker, command=inner):
                    self.deliver(worker, inner)
                case _:
                    self.move(command)
        self.pool.check()

    def deliver(self, worker: WorkerId, command: BlocksGranted | PreemptRequest) -> None:
        if worker == self.dying:
            return
        part = self.parts[command.request_id]
        assert (part.worker, part.attempt) == (worker, command.attempt), "a command for a worker that does not run it"
        assert not part.closed, "a closed request is served"
        if isinstance(command, PreemptRequest):
            assert part.table, "preempted a request that has nothing"
            assert not part.told_to_yield, "told twice"
            part.told_to_yield = True
            return
        assert not part.told_to_yield, "a request that gives its blocks back is granted more"
        assert command.block_table[: len(part.table)] == part.table, "a block table changed under its worker"
        kept = max(len(part.table), command.cached_blocks)
        fresh = set(command.block_table[kept:])
        assert len(fresh) == len(command.block_table) - kept
        touched = {block for other in self.running() if other is not part for block in other.table}
        assert not fresh & touched, "INV-3: a block was given away under its reader"
        self.sealed -= fresh
        assert set(command.block_table[: command.cached_blocks]) <= self.sealed, "a hit on a block that is not sealed"
        part.sealed_blocks = part.sealed_blocks if part.table else command.cached_blocks
        part.table = command.block_table
        most = -(-(part.request.prompt_tokens + part.request.output_tokens_max) // BLOCK_TOKENS)
        least = 0 if self.is_granted_in_parts else part.asked
        assert least <= len(part.table) <= max(most, part.asked), "less than asked for, or more than is of use"
        part.asked = max(part.asked, len(part.table))

    def say(self, part: Part, event: PoolEvent) -> None:
        part.old.append(event)
        self.tell(event)

    def leave(self, part: Part) -> None:
        """The worker is done with the request; whoever is next sees what the pool has."""
        if part.told_to_yield:
            part.table, part.sealed_blocks = (), 0
        part.worker, part.asked, part.told_to_yield = None, 0, False

    def running(self) -> list[Part]:
        return [part for part in self.parts.values() if part.worker is not None]

    def settle(self, part: Part) -> None:
        """Forget a request that is closed and that no worker touches: the pool must have forgotten it too."""
        if part.closed and part.worker is None:
            assert self.pool.table(part.request.id) == ((), 0)
            self.gone += part.old
            del self.parts[part.request.id]

    # ---- what may happen

    @rule(stream=st.integers(0, 2), worker=workers, priority=st.integers(0, 1), blocks=st.integers(0, 3))
    def start(self, stream: int, worker: WorkerId, priority: int, blocks: int) -> None:
        assume(len(self.parts) < 6)
        self.number += 1
        request = Request(
            id=RequestId(f"r{self.number}"),
            prompt_tokens=BLOCK_TOKENS,
            output_tokens_max=BLOCK_TOKENS,
            arrived_at_s=float(self.number // 2),
            priority=priority,
        )
        part = Part(request, stream, worker=worker)
        self.parts[request.id] = part
        self.say(part, StartPrefill(request, 1, worker, "first_token"))
        self.ask(part, blocks)

    def ask(self, part: Part, blocks: int) -> None:
        """As a batcher does it: for more than it has asked for, with the prefix that it has no blocks for yet."""
        blocks = min(blocks, self.request_blocks_max)
        if part.worker is None or part.closed or part.told_to_yield or blocks <= part.asked:
            return
        part.asked = blocks
        prefix = () if part.table else chain(part.stream, blocks - 1)
        self.say(part, BlocksWanted(part.request.id, part.attempt, part.worker, blocks, prefix))

    @precondition(lambda self: any(not part.table for part in self.running()))
    @rule(data=st.data(), blocks=st.integers(1, 4))
    def want(self, data: st.DataObject, blocks: int) -> None:
        self.ask(data.draw(st.sampled_from([part for part in self.running() if not part.table])), blocks)

    @precondition(lambda self: any(part.table for part in self.running()))
    @rule(data=st.data(), more=st.integers(1, 3))
    def grow(self, data: st.DataObject, more: int) -> None:
        part = data.draw(st.sampled_from([part for part in self.running() if part.table]))
        self.ask(part, len(part.table) + more)

    @precondition(lambda self: any(part.sealed_blocks < len(part.table) for part in self.running()))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([part for part in self.running() if part.sealed_blocks < len(part.table)]))
        self.seal_to(part, data.draw(st.integers(part.sealed_blocks + 1, len(part.table))))

    def seal_to(self, part: Part, until: int) -> None:
        first, part.sealed_blocks = part.sealed_blocks, until
        self.sealed |= set(part.table[first:until])
        hashes = chain(part.stream, until)[first:]
        assert part.worker is not None
        self.say(part, BlocksSealed(part.request.id, part.attempt, part.worker, first, hashes))
        assert self.pool.table(part.request.id)[1] == until * BLOCK_TOKENS

    @precondition(lambda self: any(part.told_to_yield for part in self.running()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([part for part in self.running() if part.told_to_yield]))
        part.table, part.sealed_blocks, part.asked, part.told_to_yield = (), 0, 0, False
        assert part.worker is not None
        self.say(part, RequestDropped(part.request.id, part.attempt, part.worker, preempted=True))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), successor=st.none() | workers)
    def hand_off(self, data: st.DataObject, successor: WorkerId | None) -> None:
        part = data.draw(st.sampled_from(self.running()))
        worker, tail = part.worker, 1 if len(part.table) > part.sealed_blocks else 0
        computed_tokens = part.sealed_blocks * BLOCK_TOKENS + tail
        expected = ((), 0) if part.told_to_yield else (part.table, computed_tokens)
        self.leave(part)
        assert worker is not None
        self.say(part, PrefillFinished(part.request.id, part.attempt, worker, computed_tokens))
        if part.closed:
            self.settle(part)
            return
        if self.pool.table(part.request.id) != expected:
            assert self.pool.table(part.request.id) == ((), 0), "blocks of nobody were taken in part"
        if successor is not None:
            self.go_on(part, successor)

    def go_on(self, part: Part, worker: WorkerId) -> None:
        table, computed_tokens = self.pool.table(part.request.id)
        part.worker, part.table, part.asked = worker, table, len(table)
        part.sealed_blocks = computed_tokens // BLOCK_TOKENS
        self.say(part, StartDecode(part.request, part.attempt, worker))
        assert self.pool.table(part.request.id) == (table, computed_tokens)

    @precondition(lambda self: any(not p.closed and p.worker is None for p in self.parts.values()))
    @rule(data=st.data(), worker=workers)
    def resume(self, data: st.DataObject, worker: WorkerId) -> None:
        idle = [part for part in self.parts.values() if not part.closed and part.worker is None]
        self.go_on(data.draw(st.sampled_from(idle)), worker)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), released_first=st.booleans())
    def finish(self, data: st.DataObject, released_first: bool) -> None:
        part = data.draw(st.sampled_from(self.running()))
        assert part.worker is not None
        finished = RequestFinished(part.request.id, part.attempt, part.worker, "length")
        release = ReleaseBlocks(part.request.id)
        if released_first:
            part.closed = True
            self.say(part, release)
            assert set(self.pool.table(part.request.id)[0]) == set(part.table), "freed under its worker"
        self.leave(part)
        self.say(part, finished)
        if not released_first:
            part.closed = True
            self.say(part, release)
        self.settle(part)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(list(self.parts.values())))
        part.closed = True
        self.say(part, ReleaseBlocks(part.request.id))
        self.settle(part)

    @precondition(lambda self: any(part.closed for part in self.running()))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """The worker's answer to StopRequest."""
        part = data.draw(st.sampled_from([part for part in self.running() if part.closed]))
        worker = part.worker
        self.leave(part)
        assert worker is not None
        self.say(part, RequestDropped(part.request.id, part.attempt, worker, preempted=False))
        self.settle(part)

    @rule(worker=workers, successor=workers, news_first=st.booleans())
    def kill(self, worker: WorkerId, successor: WorkerId, news_first: bool) -> None:
        """A worker dies. The coordinator's answer may overtake the news of the death."""
        assume(worker != successor)
        self.die(worker, successor, news_first)

    @precondition(lambda self: any(part.told_to_yield for part in self.running()))
    @rule(successor=workers, news_first=st.booleans())
    def kill_before_it_gives_back(self, successor: WorkerId, news_first: bool) -> None:
        victim = next(part.worker for part in self.running() if part.told_to_yield)
        assert victim is not None
        assume(victim != successor)
        self.die(victim, successor, news_first)

    def die(self, worker: WorkerId, successor: WorkerId, news_first: bool) -> None:
        orphans = [part for part in self.parts.values() if part.worker == worker]
        for part in orphans:
            self.leave(part)
        self.dying = worker
        if news_first:
            self.tell(WorkerLost(worker, "killed"))
        for part in orphans:
            if not part.closed:
                part.attempt += 1
                part.worker = successor
                self.say(part, StartDecode(part.request, part.attempt, successor))
                part.table, computed_tokens = self.pool.table(part.request.id)
                part.asked, part.sealed_blocks = len(part.table), computed_tokens // BLOCK_TOKENS
        if not news_first:
            self.tell(WorkerLost(worker, "killed"))
        self.dying = None
        for part in orphans:
            self.settle(part)

    # ---- what is not true, or not any more

    def ignored(self, event: PoolEvent) -> None:
        before = ({key: self.pool.table(key) for key in self.parts}, self.pool.view(), self.pool.holders)
        assert self.pool.handle(event) == [], f"{event} changed something"
        assert before == ({key: self.pool.table(key) for key in self.parts}, self.pool.view(), self.pool.holders)
        self.pool.check()

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def of_a_request_that_is_gone(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.gone))
        if not isinstance(event, StartPrefill | StartDecode):  # the coordinator never starts what it has closed
            self.ignored(event)

    @precondition(lambda self: any(part.old for part in self.parts.values()))
    @rule(data=st.data())
    def of_an_attempt_that_was_given_up(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from([part for part in self.parts.values() if part.old]))
        event = data.draw(st.sampled_from(part.old))
        if isinstance(event, StartPrefill | StartDecode | ReleaseBlocks | WorkerLost):
            return
        if (event.attempt, event.worker) != (part.attempt, part.worker):
            self.ignored(event)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), stranger=workers, kind=st.integers(0, 4), attempt_off=st.integers(-1, 1))
    def of_a_stranger(self, data: st.DataObject, stranger: WorkerId, kind: int, attempt_off: int) -> None:
        """Somebody who does not run the request speaks of it, or its worker speaks of another attempt."""
        part = data.draw(st.sampled_from(self.running()))
        attempt = part.attempt + attempt_off
        assume((stranger, attempt) != (part.worker, part.attempt))
        made: list[PoolEvent] = [
            BlocksWanted(part.request.id, attempt, stranger, self.request_blocks_max, chain(part.stream, 3)),
            BlocksSealed(part.request.id, attempt, stranger, 0, chain(9, len(part.table))),
            RequestDropped(part.request.id, attempt, stranger, preempted=kind % 2 == 0),
            PrefillFinished(part.request.id, attempt, stranger, 99),
            RequestFinished(part.request.id, attempt, stranger, "stop"),
        ]
        self.ignored(made[kind])

    @precondition(lambda self: any(part.closed and part.worker is not None for part in self.parts.values()))
    @rule(data=st.data())
    def of_a_request_that_is_over(self, data: st.DataObject) -> None:
        """Its worker has not heard yet and asks for more: nothing is granted, nothing is freed under it."""
        part = data.draw(st.sampled_from([part for part in self.running() if part.closed]))
        assert part.worker is not None
        self.ignored(BlocksWanted(part.request.id, part.attempt, part.worker, self.request_blocks_max, ()))

    # ---- what must hold

    @invariant()
    def tables_agree(self) -> None:
        view = self.pool.view()
        assert view.blocks_free + view.blocks_used + view.blocks_cached == TOTAL
        assert self.pool.holders == len(self.parts)
        for part in self.running():
            assert self.pool.table(part.request.id)[0] == part.table, "the worker's table is not the pool's"

    # ---- the end: everybody behaves, and everybody gets there

    def one_turn(self, part: Part) -> None:
        """Whoever runs the request does the next right thing."""
        request, worker = part.request, part.worker
        if worker is None:
            self.go_on(part, WORKERS[0])
        elif part.closed:
            self.leave(part)
            self.say(part, RequestDropped(request.id, part.attempt, worker, preempted=False))
        elif part.told_to_yield:
            part.table, part.sealed_blocks, part.asked, part.told_to_yield = (), 0, 0, False
            self.say(part, RequestDropped(request.id, part.attempt, worker, preempted=True))
        elif len(part.table) == self.request_blocks_max:
            self.leave(part)
            self.say(part, RequestFinished(request.id, part.attempt, worker, "stop"))
            part.closed = True
            self.say(part, ReleaseBlocks(request.id))
        elif part.asked < self.request_blocks_max:
            self.ask(part, self.request_blocks_max)
        self.settle(part)

    def teardown(self) -> None:
        """Every request gets all its blocks at last, the oldest first; then nothing is used and nothing is lost."""
        for _ in range(8 * len(self.parts) + 8):
            for part in list(self.parts.values()):
                self.one_turn(part)
        assert not self.parts, f"never served: {list(self.parts)}"
        self.stores_are_done()
        view = self.pool.view()
        assert msgspec.structs.astuple(view)[1:] == (TOTAL, TOTAL - view.blocks_cached, 0, view.blocks_cached)
        assert self.pool.holders == 0
        assert view.blocks_cached == len({name for name in self.findable if self.pool.held_tokens([name])})

    def stores_are_done(self) -> None: ...
