"""INV-2, INV-3, INV-4 of the host pool, under workers that answer in any order, late, twice, and for old attempts."""

from __future__ import annotations

from hypothesis import settings

from tests.property.pool_machine import PoolUnderAnyOrder

TestHostPool = PoolUnderAnyOrder.TestCase
TestHostPool.settings = settings(max_examples=150, stateful_step_count=60)
