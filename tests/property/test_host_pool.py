"""INV-2, INV-3, INV-4 of the host pool, under workers that answer in any order, late, twice, and for old attempts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from baton.core.messages import BlocksGranted, PoolEvent, PreemptRequest, StartPrefill
from baton.core.prefixes import CachedRun, EngineCacheChanged
from baton.core.types import HostId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.pool_machine import BLOCK_TOKENS, TOTAL, Part, PoolUnderAnyOrder, chain

TestHostPool = PoolUnderAnyOrder.TestCase
TestHostPool.settings = settings(max_examples=settings().max_examples * 3 // 2, stateful_step_count=60)


class PoolThatGivesAtTheStart(PoolUnderAnyOrder):
    """Prompts that are alone on their workers get their first blocks without a question."""

    def new_pool(self) -> HostPool:
        return HostPool(
            host=HostId("h"),
            blocks_total=TOTAL,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            prompts=PromptRules(growth_tokens=BLOCK_TOKENS),
        )

    def say(self, part: Part, event: PoolEvent) -> None:
        super().say(part, event)
        if not isinstance(event, StartPrefill):
            return
        table, computed_tokens = self.pool.table(event.request.id)
        if table:
            others = [other for other in self.parts.values() if other.worker == event.worker and other is not part]
            assert not others, "a worker that has other requests asks"
            self.deliver(event.worker, BlocksGranted(event.request.id, 1, table, computed_tokens // BLOCK_TOKENS))


TestPoolThatGivesAtTheStart = PoolThatGivesAtTheStart.TestCase
TestPoolThatGivesAtTheStart.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)


class PoolThatMirrors(PoolUnderAnyOrder):
    """An engine server caches and forgets blocks of the same prompts at any time."""

    @rule(stream=st.integers(0, 2), first=st.integers(0, 3), blocks=st.integers(0, TOTAL), is_cleared=st.booleans())
    def store(self, stream: int, first: int, blocks: int, is_cleared: bool) -> None:
        hashes = chain(stream, first + blocks)
        run = CachedRun(hashes[first - 1] if first else None, first, hashes[first:])
        self.tell(EngineCacheChanged(HostId("h"), stored=(run,), is_cleared=is_cleared))

    @rule(stream=st.integers(0, 2), first=st.integers(0, 3), blocks=st.integers(0, 4))
    def remove(self, stream: int, first: int, blocks: int) -> None:
        removed = chain(stream, first + blocks)[first:]
        self.tell(EngineCacheChanged(HostId("h"), removed=removed))
        assert not self.findable & {*removed}

    def deliver(self, worker: WorkerId, command: BlocksGranted | PreemptRequest) -> None:
        found = (self.pool.grants.arena.blocks.find(name) for name in self.findable)
        self.sealed |= {block for block in found if block is not None}
        super().deliver(worker, command)


TestPoolThatMirrors = PoolThatMirrors.TestCase
TestPoolThatMirrors.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)
