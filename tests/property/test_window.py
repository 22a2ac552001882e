"""Sliding windows: hits in a pool and in the index, and no block is freed while a request reads it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.core.types import BlockHash, HostId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.prefix_index import PrefixIndex
from baton.decide.kv.window import PromptRules, Window, behind_blocks, longest_hit
from baton.decide.policy.eviction import LeastRecentlyUsed
from tests.property.little_cluster import BLOCK_TOKENS, Arena
from tests.property.test_batcher import BatchersUnderAnyOrder

HOSTS = [HostId(f"host-{number}") for number in range(3)]
windows = st.builds(Window, tokens=st.integers(1, 20), step_tokens=st.sampled_from((4, 8, 12)))
masks = st.lists(st.booleans(), max_size=12)


def hit_by_trying(held: list[bool], window: Window | None, first: int) -> int:
    """Try every length, the longest first."""
    for count in range(len(held), 0, -1):
        seen_from = max(first, behind_blocks(window, count * BLOCK_TOKENS, BLOCK_TOKENS))
        if all(held[seen_from:count]):
            return count
    return 0


@given(held=masks, window=st.none() | windows, first=st.integers(0, 3))
def test_a_hit_is_the_longest_run_without_a_missing_block(held: list[bool], window: Window | None, first: int) -> None:
    first = 0 if window is None else first
    found = longest_hit(held, window, BLOCK_TOKENS, first)
    assert max(first, found) == max(first, hit_by_trying(held, window, first))


@given(held=st.lists(masks, min_size=3, max_size=3), window=windows)
def test_the_index_finds_for_each_host_what_the_host_would_find(held: list[list[bool]], window: Window) -> None:
    names = [BlockHash(bytes([depth])) for depth in range(12)]
    index = PrefixIndex()
    for host, mask in zip(HOSTS, held, strict=True):
        index.store(host, [name for name, is_held in zip(names, mask, strict=False) if is_held])
    found = index.hit_blocks(names, window, BLOCK_TOKENS)
    expected = {
        host: longest_hit([*mask, *[False] * (12 - len(mask))], window, BLOCK_TOKENS)
        for host, mask in zip(HOSTS, held, strict=True)
    }
    assert found == {host: count for host, count in expected.items() if count}


@given(window=windows, computed=st.integers(0, 80), more=st.integers(0, 20))
def test_what_is_let_go_no_later_token_sees(window: Window, computed: int, more: int) -> None:
    """Not even the one that is computed again; and what was let go once stays let go."""
    behind = window.behind_tokens(computed)
    assert behind <= max(0, computed - 1 - window.tokens + 1)
    assert behind <= window.behind_tokens(computed + more)
    assert computed - behind <= window.tokens + window.step_tokens


class BatchersBehindAWindow(BatchersUnderAnyOrder):
    """As the others, in an arena that holds no whole request: what each token sees is there, and nothing more is."""

    window = Window(tokens=3, step_tokens=BLOCK_TOKENS)

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(window_tokens=self.window.tokens)

    def new_pool(self, prompts: PromptRules) -> HostPool:
        return HostPool(
            host=HostId("h"),
            blocks_total=self.window.room_tokens(BLOCK_TOKENS) // BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            eviction=LeastRecentlyUsed,
            prompts=replace(prompts, window=self.window),
        )


TestBatchersBehindAWindow = BatchersBehindAWindow.TestCase
TestBatchersBehindAWindow.settings = settings(max_examples=settings().max_examples, stateful_step_count=60)
