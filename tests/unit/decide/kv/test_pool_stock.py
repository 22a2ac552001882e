"""How much more than it asks for a request is given where room is plenty."""

from __future__ import annotations

from baton.core.copies import LandingGranted, LandingWanted
from baton.core.messages import BlocksGranted, BlocksWanted, PoolCommand, StartPrefill, ToWorker
from baton.core.types import HostId, Request, RequestId, WorkerId
from baton.decide.kv.host_pool import HostPool
from baton.decide.policy.eviction import LeastRecentlyUsed

A = WorkerId("a")


def request(name: str, output_tokens_max: int) -> Request:
    return Request(id=RequestId(name), prompt_tokens=8, output_tokens_max=output_tokens_max, arrived_at_s=0.0)


def pool(blocks: int) -> HostPool:
    return HostPool(host=HostId("h"), blocks_total=blocks, block_tokens=4, eviction=LeastRecentlyUsed)


def grow(made: HostPool, name: str, blocks: int) -> list[int]:
    """Ask for a table so long. Returns how long the granted ones are."""
    return granted(made.handle(BlocksWanted(RequestId(name), 1, A, blocks)))


def begin(made: HostPool, name: str, blocks: int, output_tokens_max: int) -> list[int]:
    made.handle(StartPrefill(request(name, output_tokens_max), 1, A, "end"))
    return grow(made, name, blocks)


def granted(commands: list[PoolCommand]) -> list[int]:
    tables = [command.command for command in commands if isinstance(command, ToWorker)]
    return [len(command.block_table) for command in tables if isinstance(command, BlocksGranted)]


def test_in_an_empty_arena_a_request_gets_twice_what_it_asks_for_up_to_its_longest_output() -> None:
    """8 + 30 tokens are 10 blocks. It asks once more, and never again."""
    made = pool(100)
    assert begin(made, "alone", 3, 30) == [6]
    assert grow(made, "alone", 7) == [10]


def test_requests_share_spare_blocks_equally_and_half_of_the_arena_stays_free() -> None:
    made = pool(40)
    assert begin(made, "first", 12, 1000) == [20]
    assert begin(made, "second", 4, 1000) == [4]
    assert grow(made, "second", 6) == [6]


def test_the_part_gets_smaller_the_more_are_here() -> None:
    made = pool(80)
    assert begin(made, "first", 6, 40) == [12]
    assert begin(made, "second", 16, 1000) == [16 + (80 - 12 - 16 - 40) // 2]


def test_a_pool_that_keeps_all_of_it_free_gives_what_is_asked_for() -> None:
    made = pool(100)
    made.grants.kept_free_blocks = 100
    assert begin(made, "alone", 3, 30) == [3]


def test_a_copy_lands_in_what_it_was_planned_for() -> None:
    made = pool(100)
    wanted = LandingWanted(request=request("moves", 1000), attempt=1, worker=A, blocks=3, prefix=())
    (command,) = made.handle(wanted)
    assert isinstance(command, LandingGranted)
    assert len(command.block_table) == 3
