"""INV-2, INV-3, INV-4 of a host pool with a spill space, whose workers copy late, die first, or give blocks back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.core.messages import BlocksGranted, PoolEvent, PreemptRequest, ReleaseBlocks, StartDecode, StartPrefill
from baton.core.spill import BlocksSpilled, SpillBlocks, with_slots
from baton.core.types import BlockId, HostId, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.spill import SpillRules
from baton.decide.kv.window import PromptRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.pool_machine import BLOCK_TOKENS, TOTAL, Part, PoolUnderAnyOrder, workers

SLOTS = 6
HOT_BLOCKS = 6


class PoolWithSpill(PoolUnderAnyOrder):
    """Requests of up to twice the arena. Workers confirm their copies at once or later."""

    request_blocks_max, is_granted_in_parts = HOT_BLOCKS + SLOTS, True

    def __init__(self) -> None:
        self.copied: dict[RequestId, tuple[BlocksSpilled, tuple[BlockId, ...]]] = {}
        """Copies that no worker has confirmed, and the blocks that they read."""
        super().__init__()

    def new_pool(self) -> HostPool:
        spill = SpillRules(blocks=SLOTS, token_read_s=0.0, tokens_max=1000)
        return HostPool(
            host=HostId("h"),
            blocks_total=TOTAL,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            prompts=PromptRules(spill=spill),
        )

    def deliver(self, worker: WorkerId, command: BlocksGranted | PreemptRequest | SpillBlocks) -> None:
        if isinstance(command, SpillBlocks):
            if worker != self.dying:
                self.spill(self.parts[command.request_id], worker, command)
            return
        if isinstance(command, BlocksGranted):
            kept = max(len(self.parts[command.request_id].table), command.cached_blocks)
            fresh = {*command.block_table[kept:]}
            read = {block for _, blocks in self.copied.values() for block in blocks}
            assert not fresh & read, "INV-3: a block was given away under its copy"
        super().deliver(worker, command)
        if isinstance(command, BlocksGranted) and worker != self.dying:
            hot = sum(block < TOTAL for block in command.block_table)
            assert hot <= HOT_BLOCKS, "one request has more than its share of the arena"

    def spill(self, part: Part, worker: WorkerId, order: SpillBlocks) -> None:
        end = order.first + len(order.blocks)
        assert (part.worker, part.attempt) == (worker, order.attempt)
        assert not part.told_to_yield, "a request that gives its blocks back is copied"
        assert end < part.sealed_blocks, "the newest sealed block may be written again after a handoff"
        assert part.table[order.first : end] == order.blocks
        used = {block for other in self.running() for block in other.table}
        part.table = with_slots(part.table, order.first, order.slots)
        ids = part.table[order.first : end]
        assert not used & {*ids}, "a slot has two owners"
        self.sealed |= {*ids}
        self.copied[part.request.id] = BlocksSpilled(part.request.id, part.attempt, worker, order.first), order.blocks

    def say(self, part: Part, event: PoolEvent) -> None:
        """Confirm first what the worker has copied, as its report does. A dead worker confirms nothing."""
        if not isinstance(event, StartPrefill | StartDecode | ReleaseBlocks | BlocksSpilled):
            self.confirm(part)
        super().say(part, event)

    def leave(self, part: Part) -> None:
        self.confirm(part)
        super().leave(part)

    def confirm(self, part: Part) -> None:
        told = self.copied.pop(part.request.id, None)
        if told is not None and (told[0].worker, told[0].attempt) == (part.worker or told[0].worker, part.attempt):
            super().say(part, told[0])

    @precondition(lambda self: self.running())
    @rule(data=st.data(), successor=st.none() | workers)
    def hand_off(self, data: st.DataObject, successor: WorkerId | None) -> None:
        """The report of the end of a prompt confirms copies first, which may grant blocks."""
        for part in self.running():
            self.confirm(part)
        super().hand_off(data, successor)

    @precondition(lambda self: self.copied)
    @rule(data=st.data())
    def confirm_copy(self, data: st.DataObject) -> None:
        self.confirm(self.parts[data.draw(st.sampled_from(list(self.copied)))])

    def one_turn(self, part: Part) -> None:
        """Seal what is computed, so that the oldest blocks can be spilled for the next ones."""
        self.confirm(part)
        is_computing = part.worker is not None and not (part.closed or part.told_to_yield)
        if is_computing and part.sealed_blocks < len(part.table):
            self.seal_to(part, len(part.table))
        super().one_turn(part)

    def die(self, worker: WorkerId, successor: WorkerId, news_first: bool) -> None:
        self.copied = {key: told for key, told in self.copied.items() if told[0].worker != worker}
        super().die(worker, successor, news_first)


TestPoolWithSpill = PoolWithSpill.TestCase
TestPoolWithSpill.settings = settings(max_examples=settings().max_examples, stateful_step_count=50)
