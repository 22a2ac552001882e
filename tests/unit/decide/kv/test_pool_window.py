"""A pool whose model sees a window only: what a request holds, and what is left as cache."""

from __future__ import annotations

from baton.core.copies import LandingEnded, LandingGranted, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.messages import (
    BlocksGranted,
    BlocksSealed,
    BlocksWanted,
    PoolCommand,
    ReleaseBlocks,
    RequestFinished,
    StartDecode,
    StartPrefill,
    ToWorker,
)
from baton.core.types import BlockHash, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.kv.window import PromptRules, Window, request_tokens_max
from baton.decide.policy.eviction import LeastRecentlyUsed

A = WorkerId("a")
WINDOW = Window(tokens=8, step_tokens=4)


def pool(blocks: int, window: Window | None = WINDOW) -> HostPool:
    return HostPool(
        host=HostId("h"),
        blocks_total=blocks,
        block_tokens=4,
        eviction=LeastRecentlyUsed,
        prompts=PromptRules(window=window),
    )


def request(name: str) -> Request:
    return Request(id=RequestId(name), prompt_tokens=40, output_tokens_max=8, arrived_at_s=0.0)


def names(count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([depth])) for depth in range(count))


def granted(commands: list[PoolCommand]) -> BlocksGranted:
    (grant,) = [command.command for command in commands if isinstance(command, ToWorker)]
    assert isinstance(grant, BlocksGranted)
    return grant


def compute(made: HostPool, name: str, blocks: int) -> None:
    """Let a request compute so many blocks, one after the other, and end."""
    made.handle(StartPrefill(request(name), 1, A, "end"))
    made.handle(BlocksWanted(RequestId(name), 1, A, blocks))
    for block in range(blocks):
        made.handle(BlocksSealed(RequestId(name), 1, A, block, names(blocks)[block : block + 1]))
    made.handle(RequestFinished(RequestId(name), 1, A, "length"))
    made.handle(ReleaseBlocks(RequestId(name)))
    made.check()


def test_what_is_behind_the_window_is_let_go_while_the_request_runs() -> None:
    """Four blocks are enough for ten: two in the window, one that it reaches into, one to write."""
    made, r = pool(5), RequestId("r")
    made.handle(StartPrefill(request("r"), 1, A, "end"))
    first = granted(made.handle(BlocksWanted(r, 1, A, 10)))
    assert len(first.block_table) == 2, "no more is given at a time than the window"
    for block in range(10):
        made.handle(BlocksSealed(r, 1, A, block, names(10)[block : block + 1]))
        made.check()
        assert made.blocks_of(A) <= 5
    table, computed_tokens = made.table(r)
    assert (len(table), computed_tokens) == (10, 40)
    assert made.held_from_tokens(r) == 32
    assert made.view().blocks_used == 2


def test_without_a_window_nothing_is_let_go() -> None:
    """As where one layer of many sees everything: then the model has no window here."""
    made, r = pool(10, window=None), RequestId("r")
    made.handle(StartPrefill(request("r"), 1, A, "end"))
    assert len(granted(made.handle(BlocksWanted(r, 1, A, 10))).block_table) == 10
    made.handle(BlocksSealed(r, 1, A, 0, names(10)))
    assert made.held_from_tokens(r) == 0
    assert made.view().blocks_used == 10


def test_a_hit_needs_the_blocks_of_the_last_window_only() -> None:
    """The first blocks are evicted, but a hit on the blocks inside the window still saves the whole prefix."""
    made = pool(6)
    compute(made, "before", 6)
    assert made.held_tokens(names(6)) == 24
    made.handle(StartPrefill(request("other"), 1, A, "end"))
    made.handle(BlocksWanted(RequestId("other"), 1, A, 2))  # takes the two that were let go first
    made.handle(RequestFinished(RequestId("other"), 1, A, "length"))
    made.handle(ReleaseBlocks(RequestId("other")))
    assert made.held_tokens(names(1)) == 0, "the first block is gone"
    assert made.held_tokens(names(6)) == 24
    made.handle(StartPrefill(request("r"), 1, A, "end"))
    hit = granted(made.handle(BlocksWanted(RequestId("r"), 1, A, 7, names(6))))
    assert (hit.cached_blocks, len(hit.block_table)) == (6, 7)
    assert made.held_from_tokens(RequestId("r")) == 16
    made.check()


def test_what_lands_is_what_will_be_seen() -> None:
    """Ten blocks of a request, of which seven are behind the window: three are kept for it, and granted to a wire."""
    made, moved = pool(4), request("r")
    (grant,) = made.handle(LandingWanted(moved, 2, A, 10, names(10), first_block=7))
    assert isinstance(grant, LandingGranted)
    assert (grant.cached_blocks, len(grant.block_table), made.view().blocks_used) == (7, 10, 3)
    made.handle(LandingEnded(moved.id, 39, names(9)))
    made.handle(StartDecode(moved, 2, A))
    assert made.table(moved.id) == (grant.block_table, 39)
    made.check()


def test_what_has_not_landed_in_whole_is_computed_again() -> None:
    """A hit on the last block alone is not enough: two more blocks are inside the window."""
    made, moved = pool(4), request("r")
    made.handle(LandingWanted(moved, 2, A, 10, names(10), first_block=7))
    made.handle(LandingEnded(moved.id, 28, names(7)))
    assert made.table(moved.id) == ((), 0)
    assert made.view().blocks_used == 0
    made.check()


def test_a_wire_reads_on_in_what_the_request_has_let_go() -> None:
    made, r = pool(8), RequestId("r")
    made.handle(StartPrefill(request("r"), 1, A, "end"))
    made.handle(BlocksWanted(r, 1, A, 2))
    made.handle(BlocksSealed(r, 1, A, 0, names(2)))
    made.handle(LeaseWanted(request("r"), names(2)))
    made.handle(BlocksWanted(r, 1, A, 6))
    made.handle(BlocksSealed(r, 1, A, 2, names(6)[2:4]))
    made.handle(BlocksSealed(r, 1, A, 4, names(6)[4:]))
    assert made.held_from_tokens(r) == 16
    assert made.view().blocks_used == 4, "two that it sees, two that are read"
    made.handle(LeaseEnded(r))
    assert made.view().blocks_used == 2
    made.check()


def test_an_arena_that_holds_a_window_holds_any_request() -> None:
    assert request_tokens_max(None, 1000, 16) == 1000
    assert request_tokens_max(Window(tokens=256), 1000, 16) is None
    assert request_tokens_max(Window(tokens=4096), 1000, 16) == 1000
