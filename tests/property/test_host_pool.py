"""INV-2, INV-3, INV-4 of the host pool, under workers that answer in any order, late, twice, and for old attempts."""

from __future__ import annotations

from hypothesis import settings

from baton.core.messages import BlocksGranted, PoolEvent, StartPrefill
from baton.core.types import HostId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.pool_machine import BLOCK_TOKENS, TOTAL, Part, PoolUnderAnyOrder

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
