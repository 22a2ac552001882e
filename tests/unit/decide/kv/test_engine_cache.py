"""The pool of an engine server's host mirrors the server's cache, and routing uses it."""

from __future__ import annotations

from baton.core.messages import BlocksSealed, BlocksWanted, ReleaseBlocks, RequestFinished, StartPrefill
from baton.core.prefixes import BlocksRemoved, BlocksStored, CachedRun, EngineCacheChanged
from baton.core.types import BlockHash, HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed

HOST, A, R = HostId("h"), WorkerId("a"), RequestId("r")
HASHES = tuple(BlockHash(f"{number}".encode()) for number in range(8))


def pool(blocks: int = 8) -> HostPool:
    return HostPool(host=HOST, blocks_total=blocks, block_tokens=4, eviction=LeastRecentlyUsed)


def stored(first: int, until: int) -> EngineCacheChanged:
    run = CachedRun(HASHES[first - 1] if first else None, first, HASHES[first:until])
    return EngineCacheChanged(HOST, stored=(run,))


def test_stored_blocks_are_hits_and_removed_ones_are_none() -> None:
    made = pool()
    assert made.handle(stored(0, 3)) == [BlocksStored(HOST, HASHES[:3])]
    assert made.held_tokens(HASHES) == 12
    assert made.handle(EngineCacheChanged(HOST, removed=(HASHES[1], HASHES[5]))) == [BlocksRemoved(HOST, (HASHES[1],))]
    assert made.held_tokens(HASHES) == 4
    assert (made.view().blocks_cached, made.view().blocks_free) == (2, 6)
    made.check()


def test_a_repeated_event_changes_nothing() -> None:
    made = pool()
    made.handle(stored(0, 3))
    assert made.handle(stored(0, 3)) == []
    assert made.handle(stored(0, 4)) == [BlocksStored(HOST, HASHES[3:4])]


def test_a_repeated_prompt_is_evicted_last() -> None:
    """A server that computes a prompt again keeps its blocks: so does the mirror, as the least recently used go."""
    made = pool(blocks=4)
    made.handle(stored(0, 2))
    made.handle(stored(6, 8))
    made.handle(stored(0, 2))
    assert made.handle(stored(2, 4)) == [BlocksRemoved(HOST, (HASHES[7], HASHES[6])), BlocksStored(HOST, HASHES[2:4])]
    assert made.held_tokens(HASHES) == 16
    made.check()


def test_a_full_pool_evicts_and_never_takes_the_blocks_of_a_request() -> None:
    made = pool(blocks=4)
    begin(made, blocks=2)
    made.handle(stored(6, 8))
    assert made.handle(stored(2, 6)) == [BlocksRemoved(HOST, (HASHES[7], HASHES[6])), BlocksStored(HOST, HASHES[2:4])]
    assert made.view().blocks_used == 2
    made.check()


def test_a_removed_block_of_a_running_request_is_free_after_it() -> None:
    """vLLM may have preempted the request there. Baton's request keeps its block until it ends."""
    made = pool()
    begin(made, blocks=2)
    made.handle(BlocksSealed(R, 1, A, 0, HASHES[:2]))
    assert made.handle(EngineCacheChanged(HOST, is_cleared=True)) == [BlocksRemoved(HOST, HASHES[:2])]
    assert (made.held_tokens(HASHES), made.view().blocks_used, made.view().blocks_cached) == (0, 3, 0)
    made.check()
    made.handle(RequestFinished(R, 1, A, "stop"))
    made.handle(ReleaseBlocks(R))
    assert made.view().blocks_free == 8
    made.check()


def begin(made: HostPool, blocks: int) -> None:
    request = Request(id=R, prompt_tokens=8, output_tokens_max=1, arrived_at_s=0.0)
    made.handle(StartPrefill(request, 1, A, "end"))
    made.handle(BlocksWanted(R, 1, A, blocks))
    assert made.view().blocks_used >= blocks
