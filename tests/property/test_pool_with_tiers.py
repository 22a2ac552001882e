"""INV-2, INV-3, INV-4 of a host pool with tiers below it, whose stores answer late, refuse and damage blocks."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from baton.core.copies import LandingEnded, LandingGranted, LandingWanted
from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    PreemptRequest,
    ReleaseBlocks,
    RequestDropped,
    RequestFinished,
)
from baton.core.tier_messages import (
    BlocksKept,
    DropBlocks,
    LoadBlocks,
    LoadEnded,
    LoadWanted,
    ReadBack,
    ReadBackWanted,
    StoreBlocks,
    TierOpened,
    TierRests,
)
from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.pool_machine import BLOCK_TOKENS, TOTAL, WORKERS, Part, PoolUnderAnyOrder, chain, workers

TIER_BLOCKS = 5
"""Fewer than the arena has: the tier gives blocks up too."""


class PoolWithTiers(PoolUnderAnyOrder):
    """The same pool with two tiers below it, whose stores answer late, keep what they like and damage blocks.

    Prompts that are in the tiers are read into blocks that are granted for that, as transfers do it; so is what
    preempted requests had, every other time that they come back.
    """

    def __init__(self) -> None:
        self.stores: dict[str, set[BlockHash]] = {"file": set(), "remote": set()}
        self.writes: list[StoreBlocks] = []
        self.read: LoadBlocks | None = None
        self.back: dict[RequestId, list[LoadBlocks]] = {}
        """Reads of preempted requests that are under way."""
        self.granted: list[LandingGranted] = []
        super().__init__()
        left = chain(2, 3)
        self.stores["file"] |= set(left)
        self.tell(TierOpened("file", left))

    def new_pool(self) -> HostPool:
        rules = (
            TierRules(name="file", blocks_max=TIER_BLOCKS, writing_blocks_max=3, batch_blocks=2),
            TierRules(name="remote", blocks_max=TIER_BLOCKS, waiting_blocks_max=2),
        )
        return HostPool(
            host=HostId("h"),
            blocks_total=TOTAL,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            tiers=[Tier(rule, LeastRecentlyUsed) for rule in rules],
        )

    def move(self, command: PoolCommand) -> None:
        match command:
            case StoreBlocks():
                assert len(command.blocks) <= 2 or command.tier == "remote"
                assert set(command.blocks) <= self.sealed, "writes a block whose content is not final"
                assert not set(command.hashes) & self.stores[command.tier], "writes what is there"
                self.writes.append(command)
            case LoadBlocks():
                self.begin_read(command)
            case ReadBackWanted():
                self.answer(command)
            case DropBlocks():
                assert self.stores[command.tier] >= set(command.hashes), "drops what it did not keep"
                self.stores[command.tier] -= set(command.hashes)
            case LandingGranted():
                self.granted.append(command)
            case _:
                raise AssertionError(f"{command} is for nobody here")

    def begin_read(self, command: LoadBlocks) -> None:
        for tier, name in zip(command.tiers, command.hashes, strict=True):
            assert name in self.stores[tier], "reads what no store has said that it has"
        self.sealed -= set(command.write)
        if not command.back:
            assert self.read is None
            self.read = command
        elif command.hashes:
            self.back.setdefault(command.request_id, []).append(command)
        else:
            self.tell(LoadEnded(command.request_id, command.number, ()))

    def answer(self, wanted: ReadBackWanted) -> None:
        """Have all read that the tiers have, or nothing."""
        assert self.pool.tiers is not None
        self.number += 1
        reached = self.pool.tiers.reach(wanted.hashes)
        blocks = reached[-1].blocks if reached and self.number % 2 else 0
        self.tell(ReadBack(wanted.request_id, self.number, blocks * BLOCK_TOKENS))

    def growing(self) -> list[Part]:
        return [part for part in self.running() if part.table and not (part.told_to_yield or part.closed)]

    @precondition(lambda self: len(self.growing()) > 1)
    @rule()
    def the_oldest_takes_all(self) -> None:
        """Everybody else gives way to it, and asks again when it has gone: what they had is below the arena."""
        old = min(self.growing(), key=lambda part: (part.request.priority, part.request.arrived_at_s, part.request.id))
        assert old.worker is not None
        for part in self.growing():
            first, part.sealed_blocks = part.sealed_blocks, len(part.table)
            self.sealed |= set(part.table)
            hashes = chain(part.stream, len(part.table))[first:]
            assert part.worker is not None
            self.say(part, BlocksSealed(part.request.id, part.attempt, part.worker, first, hashes))
        for _ in self.parts:
            old.asked = TOTAL
            self.say(old, BlocksWanted(old.request.id, old.attempt, old.worker, TOTAL, ()))
            self.stores_are_done()
            for part in [part for part in self.running() if part.told_to_yield and part is not old]:
                self.one_turn(part)
        worker, old.closed = old.worker, True
        self.leave(old)
        self.say(old, RequestFinished(old.request.id, old.attempt, worker, "length"))
        self.say(old, ReleaseBlocks(old.request.id))
        self.settle(old)
        for part in [part for part in self.running() if not part.table and not part.asked]:
            self.ask(part, 4)

    @precondition(lambda self: self.back)
    @rule(successor=workers, news_first=st.booleans())
    def kill_while_it_is_read(self, successor: WorkerId, news_first: bool) -> None:
        part = self.parts[min(self.back)]
        assume(part.worker is not None and part.worker != successor)
        assert part.worker is not None
        self.die(part.worker, successor, news_first)

    @precondition(lambda self: self.back)
    @rule()
    def cancel_while_it_is_read(self) -> None:
        part = self.parts[min(self.back)]
        part.closed = True
        self.say(part, ReleaseBlocks(part.request.id))
        self.settle(part)

    @precondition(lambda self: self.back)
    @rule(data=st.data(), luck=st.integers(0, 3))
    def a_preempted_request_is_read(self, data: st.DataObject, luck: int) -> None:
        """With luck, or one of its blocks is not there."""
        request_id = data.draw(st.sampled_from(sorted(self.back)))
        self.end_read_back(self.back[request_id][0], luck)

    def end_read_back(self, command: LoadBlocks, bad: int | None = None) -> None:
        self.back[command.request_id].remove(command)
        if not self.back[command.request_id]:
            del self.back[command.request_id]
        whole = tuple(place != bad for place in range(len(command.hashes)))
        landed = whole.index(False) if False in whole else len(whole)
        self.sealed |= set(command.write[:landed])
        self.tell(LoadEnded(command.request_id, command.number, whole))

    def settle(self, part: Part) -> None:
        """What is over is known until nothing reads into its blocks any more."""
        if part.closed and part.worker is None:
            for command in list(self.back.get(part.request.id, ())):
                self.end_read_back(command)
        super().settle(part)

    def deliver(self, worker: WorkerId, command: BlocksGranted | PreemptRequest) -> None:
        if isinstance(command, BlocksGranted):
            part = self.parts[command.request_id]
            fresh = set(command.block_table[max(len(part.table), command.cached_blocks) :])
            reading = {block for commands in self.back.values() for load in commands for block in load.write}
            assert not fresh & (self.busy_blocks() | reading), "INV-3: a block was given away under its store"
        super().deliver(worker, command)

    def busy_blocks(self) -> set[BlockId]:
        return {block for write in self.writes for block in write.blocks}

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), luck=st.integers(0, 3))
    def store_answers(self, data: st.DataObject, luck: int) -> None:
        """All went well three times of four; otherwise the first block did not."""
        command = data.draw(st.sampled_from(self.writes))
        self.writes.remove(command)
        well = tuple(luck > 0 or place > 0 for place in range(len(command.blocks)))
        kept = {name for name, is_kept in zip(command.hashes, well, strict=True) if is_kept}
        self.stores[command.tier] |= kept
        self.tell(BlocksKept(command.number, well))
        assert self.pool.handle(BlocksKept(command.number, well)) == [], "an answer that is repeated changes nothing"

    @rule(data=st.data(), stream=st.integers(0, 2), luck=st.integers(0, 2))
    def read_a_prompt(self, data: st.DataObject, stream: int, luck: int) -> None:
        """A request lands from the tiers, is read with luck or without, and is over."""
        prompt = chain(stream, 4)
        assert self.pool.tiers is not None
        reached = self.pool.tiers.reach(prompt)
        blocks = reached[-1].blocks if reached else 0
        if blocks * BLOCK_TOKENS <= self.pool.held_tokens(prompt):
            return
        self.number += 1
        request = Request(
            id=RequestId(f"read-{self.number}"), prompt_tokens=99, output_tokens_max=1, arrived_at_s=1e6 + self.number
        )
        self.tell(LandingWanted(request, 1, WORKERS[0], blocks, prompt[:blocks]))
        if not self.granted:  # no room
            self.tell(ReleaseBlocks(request.id))
            self.tell(RequestDropped(request.id, 1, WORKERS[0], preempted=False))
            return
        granted = self.granted.pop()
        held = granted.cached_blocks
        into = granted.block_table[held:blocks]
        assert not set(into) & self.busy_blocks(), "INV-3: it is read into a block that a store still reads"
        self.sealed -= set(into)
        self.tell(LoadWanted(request.id, self.number, prompt[held:blocks], into))
        whole: tuple[bool, ...] = ()
        command, self.read = self.read, None
        assert command is not None, "a wish that was not answered"
        if command.hashes:
            whole = tuple(place != luck for place in range(len(command.hashes)))
            self.tell(LoadEnded(request.id, self.number, whole))
        landed = held + (whole.index(False) if False in whole else len(whole))
        self.sealed |= set(granted.block_table[:landed])
        self.tell(LandingEnded(request.id, landed * BLOCK_TOKENS, prompt[:landed]))
        self.tell(ReleaseBlocks(request.id))
        self.tell(RequestDropped(request.id, 1, WORKERS[0], preempted=False))

    @invariant()
    def tiers_know_what_stores_have(self) -> None:
        """INV-4 for the places of a tier; the news of the host are those of its arena."""
        assert self.pool.tiers is not None
        for tier in self.pool.tiers.tiers:
            view = tier.view()
            kept = self.stores[tier.name]
            assert {name for name in kept if tier.has(name)} == kept, "a store has what its tier forgot without a word"
            assert view.blocks_cached == len(kept), "a tier claims what its store does not have"
            assert len(kept) + view.blocks_writing <= TIER_BLOCKS
        arena = {name for name in self.findable if self.pool.held_tokens([name])}
        assert arena == self.findable

    @rule(tier=st.sampled_from(["file", "remote"]), rests=st.booleans())
    def a_store_is_left_alone(self, tier: str, rests: bool) -> None:
        """What it has stays there, and nothing is asked of it."""
        self.tell(TierRests(tier, rests))
        assert self.pool.tiers is not None
        resting = set(self.pool.tiers.resting)
        assert not {found.name for found in self.pool.tiers.find(chain(2, 3))} & resting

    def one_turn(self, part: Part) -> None:
        self.stores_are_done()
        super().one_turn(part)

    def stores_are_done(self) -> None:
        for command in [command for commands in self.back.values() for command in commands]:
            self.end_read_back(command)
        while self.writes:
            command = self.writes.pop()
            self.stores[command.tier] |= set(command.hashes)
            self.tell(BlocksKept(command.number, (True,) * len(command.hashes)))


TestPoolWithTiers = PoolWithTiers.TestCase
TestPoolWithTiers.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=80)
