"""A copy plan over a real transport: some bytes arrive in place, others through staging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from msgspec.structs import replace

from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import KVLayout
from baton.move.transport.convert import convert, source_extents, target_extents, unstage
from baton.move.transport.port import Transport
from baton.move.transport.tcp import TcpTransport
from tests.transfers.memory_transport import MemoryExchange, MemoryTransport

MODEL = KVLayout(layers=6, kv_heads=4, head_dim=32, block_tokens=16, dtype="bfloat16")
TOKENS = range(7, 77)


@dataclass(frozen=True)
class Ends:
    """Both ends of a transport."""

    source: Transport
    target: Transport


@pytest.fixture(params=["memory", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "memory":
        exchange = MemoryExchange()
        made = Ends(MemoryTransport(exchange), MemoryTransport(exchange))
    else:
        made = Ends(TcpTransport("127.0.0.1:0"), TcpTransport("127.0.0.1:0"))
    yield made
    made.target.close()
    made.source.close()


@pytest.mark.parametrize(
    "target_layout",
    [
        MODEL,
        replace(MODEL, block_tokens=40, order="head_major"),
        replace(MODEL, tensor_parallel=8, pipeline_parallel=2),
        replace(MODEL, dtype="int8"),
    ],
    ids=["same", "blocks of 40", "8 ranks, 2 stages", "int8"],
)
def test_what_is_pulled_and_unstaged_is_what_one_memory_would_have_given(ends: Ends, target_layout: KVLayout) -> None:
    """The other bytes of the arenas stay unchanged."""
    source_blocks = [BlockId(block) for block in (4, 5, 6, 0, 2)]
    target_blocks = [BlockId(block) for block in (7, 1, 2, 3, 0)]
    source = np.random.default_rng(5).normal(size=8 * MODEL.block_bytes // 2).astype(np.float16).view(np.uint8)
    target, expected = (np.full(8 * target_layout.block_bytes, 0xA5, np.uint8) for _ in range(2))
    plan = Conversion(MODEL, target_layout).plan(source_blocks, target_blocks, TOKENS)
    convert(plan, memoryview(source), memoryview(expected))

    staging = np.zeros(max(1, plan.staging_bytes), np.uint8)
    arena_region = ends.target.register(memoryview(target))
    staging_region = ends.target.register(memoryview(staging))
    ticket = ends.source.offer(source_extents(plan, ends.source.register(memoryview(source))), lease_s=60.0)
    pull = ends.target.pull(ticket, target_extents(plan, arena_region, staging_region))
    assert pull.wait(30.0) == plan.read_bytes
    unstage(plan, memoryview(staging), memoryview(target))
    assert np.array_equal(target, expected)


def test_whole_blocks_need_no_staging_and_what_is_cut_out_of_one_does() -> None:
    """The first block is cut at token 7, the last at 77."""
    blocks = [BlockId(block) for block in (4, 5, 6, 0, 2)]
    plan = Conversion(MODEL, MODEL).plan(blocks, blocks[::-1], TOKENS)
    whole = sum(landing.size_bytes for landing in plan.landings if not landing.staged)
    assert whole == 3 * MODEL.block_bytes
    assert 0 < plan.staging_bytes < 2 * MODEL.block_bytes
    assert len(plan.reads) == 3  # blocks 4 to 6 adjoin
