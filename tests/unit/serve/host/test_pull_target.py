"""KV that is converted for an arena on a device equals that in host memory, and other bytes stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.types import BlockId
from baton.decide.kv.layout import KVDtype, KVLayout
from baton.move.transport.convert import source_extents
from baton.move.transport.port import Memory
from baton.move.transport.staged import StagedMemory
from baton.serve.host.pull_target import ARENA, PullTarget, Staging, block_extents, plan_of
from baton.serve.messages.moving import CopySpec
from tests.transfers.host_device_memory import HostDeviceMemory
from tests.transfers.memory_transport import MemoryExchange, MemoryTransport

BLOCKS = 12


def layout(block_tokens: int, ranks: int, dtype: KVDtype) -> KVLayout:
    return KVLayout(layers=2, kv_heads=2, head_dim=4, block_tokens=block_tokens, dtype=dtype, tensor_parallel=ranks)


@given(
    source=st.builds(layout, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2]), st.just("float32")),
    target=st.builds(
        layout, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2]), st.sampled_from(["float32", "int8"])
    ),
    skipped_blocks=st.integers(0, 1),
    tokens=st.integers(1, 20),
    order=st.permutations(range(BLOCKS)),
)
def test_a_device_gets_what_a_host_gets(
    source: KVLayout, target: KVLayout, skipped_blocks: int, tokens: int, order: list[int]
) -> None:
    first = skipped_blocks * target.block_tokens
    end = first + tokens
    spec = CopySpec(
        read=tuple(BlockId(block) for block in order[first // source.block_tokens : -(-end // source.block_tokens)]),
        write=tuple(BlockId(block) for block in order[first // target.block_tokens : -(-end // target.block_tokens)]),
        first_token=first,
        tokens=tokens,
        source=source,
        target=target,
    )
    sent = bytearray(index * 7 % 251 for index in range(BLOCKS * source.block_bytes))
    arenas = [bytearray(b"\x5a" * (BLOCKS * target.block_bytes)) for _ in range(2)]
    arrive(spec, sent, memoryview(arenas[0]))
    device = HostDeviceMemory(memoryview(arenas[1]))
    arrive(spec, sent, StagedMemory(device, portion_bytes=100, lanes=1))
    assert arenas[0] == arenas[1]
    assert arenas[0] != b"\x5a" * len(arenas[0])


def arrive(spec: CopySpec, sent: bytearray, arena: Memory) -> None:
    """Carry out a pull as a mover does, between two transports of this process."""
    exchange = MemoryExchange()
    here, there = MemoryTransport(exchange), MemoryTransport(exchange)
    try:
        assert there.register(memoryview(sent)) == here.register(arena) == ARENA
        arrival = PullTarget(spec, arena)
        arrival.plan()
        arrival.borrow(Staging(here.register))
        plan = plan_of(spec)
        extents = block_extents(spec.read, spec.source, None) if plan is None else source_extents(plan, ARENA)
        here.pull(there.offer(extents, lease_s=60.0), arrival.extents()).wait(60)
        arrival.finish()
    finally:
        here.close()
        there.close()
