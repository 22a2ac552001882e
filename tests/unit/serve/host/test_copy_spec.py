"""Copies between layouts begin anywhere in a request, and buffers are lent within a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import TransferError
from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.layout import KVLayout
from baton.move.transport.convert import convert
from baton.serve.host import pull_target as module
from baton.serve.host.pull_target import Staging, block_extents, plan_of
from baton.serve.messages.moving import CopySpec

BLOCKS = 16
"""MemoryBudget for the longest request of these tests in the smallest blocks: 2 x 16 + 30 tokens in blocks of 4."""


def layout(block_tokens: int, ranks: int) -> KVLayout:
    return KVLayout(layers=2, kv_heads=2, head_dim=4, block_tokens=block_tokens, dtype="uint8", tensor_parallel=ranks)


@given(
    source=st.builds(layout, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2])),
    target=st.builds(layout, st.sampled_from([4, 8, 16]), st.sampled_from([1, 2])),
    skipped_blocks=st.integers(0, 2),
    tokens=st.integers(1, 30),
    order=st.permutations(range(BLOCKS)),
)
def test_what_comes_over_is_what_lies_there_wherever_it_begins(
    source: KVLayout, target: KVLayout, skipped_blocks: int, tokens: int, order: list[int]
) -> None:
    """Against a copy of the whole request from its first token on, of which this is a part."""
    first = skipped_blocks * target.block_tokens
    end = first + tokens
    read = [BlockId(block) for block in order[: -(-end // source.block_tokens)]]
    write = [BlockId(block) for block in reversed(order[: -(-end // target.block_tokens)])]
    memory = memoryview(bytearray(index * 7 % 251 for index in range(BLOCKS * source.block_bytes)))
    naive, ours = (memoryview(bytearray(BLOCKS * target.block_bytes)) for _ in range(2))
    convert(Conversion(source, target).plan(read, write, range(end)), memory, naive)
    part = CopySpec(
        read=tuple(read[first // source.block_tokens :]),
        write=tuple(write[first // target.block_tokens :]),
        first_token=first,
        tokens=tokens,
        source=source,
        target=target,
    )
    plan = plan_of(part)
    if plan is None:
        assert source == target
        for ours_at, theirs_at in zip(
            block_extents(part.write, target, None), block_extents(part.read, source, None), strict=True
        ):
            run = memory[theirs_at.offset_bytes : theirs_at.offset_bytes + theirs_at.size_bytes]
            ours[ours_at.offset_bytes : ours_at.offset_bytes + ours_at.size_bytes] = run
    else:
        convert(plan, memory, ours)
    back, again = (memoryview(bytearray(BLOCKS * source.block_bytes)) for _ in range(2))
    there = Conversion(target, source)
    convert(there.plan(write, read, range(first, end)), naive, back)
    convert(there.plan(write, read, range(first, end)), ours, again)
    assert back == again
    untouched = set(range(BLOCKS)) - {int(block) for block in part.write}
    for block in untouched:
        assert not any(ours[block * target.block_bytes : (block + 1) * target.block_bytes])


def test_buffers_are_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STAGING_BYTES_MAX", 4 << 20)
    made: list[int] = []

    def register(memory: memoryview) -> int:
        made.append(memory.nbytes)
        return len(made)

    staging = Staging(register)
    first = staging.take(1000)
    staging.give(first)
    assert staging.take(5) is first
    second = staging.take((1 << 20) + 1)
    assert second.size_bytes == 2 << 20
    with pytest.raises(TransferError, match="one KV layout"):
        staging.take((1 << 20) + 1)
    staging.give(second)
    assert staging.take((1 << 20) + 1) is second
    assert made == [1 << 20, 2 << 20]


def test_idle_buffers_that_are_too_small_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, one small conversion would make every later pull of more than half of the bound fail."""
    monkeypatch.setattr(module, "_STAGING_BYTES_MAX", 4 << 20)
    staging = Staging(lambda _: 0)
    small = staging.take(1 << 20)
    small.memory[0] = 1
    staging.give(small)
    large = staging.take((3 << 20) + 5)
    assert large.size_bytes == (3 << 20) + 5
    assert small.memory[0] == 0, "its pages are free"
    with pytest.raises(TransferError, match=f"buffer of 1048576 bytes, but {large.size_bytes} of"):
        staging.take(5)
    staging.give(large)
    assert staging.take(5) is large


def test_a_small_conversion_leaves_a_large_buffer_to_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the large buffer and a second one exceed the bound, and the next large pull fails."""
    monkeypatch.setattr(module, "_STAGING_BYTES_MAX", 16 << 20)
    staging = Staging(lambda _: 0)
    large = staging.take(9 << 20)
    staging.give(large)
    small = staging.take(2 << 20)
    assert small.size_bytes == 2 << 20
    assert staging.take(8 << 20) is large
    staging.give(small)
    staging.give(large)
    assert staging.take(3 << 20).size_bytes == 4 << 20


def test_the_smallest_idle_buffers_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STAGING_BYTES_MAX", 12 << 20)
    staging = Staging(lambda _: 0)
    small, middle = staging.take(2 << 20), staging.take(4 << 20)
    staging.give(small)
    staging.give(middle)
    staging.take(8 << 20)
    assert staging.take(4 << 20) is middle
