"""Every put reports its end, however its writes end (INV-1), and urgent writes are bounded (INV-9)."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.tier_messages import BlocksKept, PutEnded, PutWanted, StoreBlocks, TierCommand
from baton.core.types import BlockHash, HostId, RequestId
from baton.decide.kv.blocks import BlockFacts, Blocks
from baton.decide.kv.tier import Tier, TierRules
from baton.decide.kv.tiers import Tiers
from baton.decide.policy.eviction import LeastRecentlyUsed


def tiers(blocks: int) -> Tiers:
    """One block is written at a time."""
    pool = Tier(TierRules(name="pool", blocks_max=100, writing_blocks_max=1), LeastRecentlyUsed)
    return Tiers(host=HostId("h"), arena=Blocks(blocks, LeastRecentlyUsed()), tiers=[pool])


def names(*numbers: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(b"%d" % number) for number in numbers)


def seal(made: Tiers, wanted: Sequence[BlockHash]) -> None:
    """The arena has these blocks, as cache, and gives up others for them. None of them waits to be written."""
    blocks, _ = made.arena.take(len(wanted))
    for depth, (block, name) in enumerate(zip(blocks, wanted, strict=True)):
        made.arena.seal(block, BlockFacts(name, start_tokens=depth))
    made.arena.unpin(blocks)
    made.arena.fresh = []


def put(made: Tiers, number: int, wanted: tuple[BlockHash, ...], run_blocks: int = 100) -> list[TierCommand]:
    made.handle(PutWanted(RequestId(f"r{number}"), number, "pool", wanted, run_blocks))
    return made.write_back()


def answer(made: Tiers, store: StoreBlocks, *, kept: bool) -> list[TierCommand]:
    made.handle(BlocksKept(store.number, (kept,) * len(store.hashes)))
    return made.write_back()


def ended(commands: list[TierCommand]) -> list[int]:
    return sorted(command.number for command in commands if isinstance(command, PutEnded))


def test_two_puts_with_one_tail_both_end_when_the_first_write_is_refused() -> None:
    """The first put drops blocks 2 and 3, for which the second waits too: they would never be written."""
    made = tiers(8)
    seal(made, names(0, 1, 2, 3))
    (store,) = put(made, 1, names(0, 2, 3))
    assert isinstance(store, StoreBlocks)
    assert put(made, 2, names(1, 2, 3)) == []
    commands = answer(made, store, kept=False)
    assert ended(commands) == [1]
    (store,) = [command for command in commands if isinstance(command, StoreBlocks)]
    assert store.hashes == names(1), "what the second alone wants is still tried"
    assert ended(answer(made, store, kept=True)) == [2]
    assert not [*made.pinned()], "nothing is written any more"


def test_no_more_blocks_are_urgent_than_the_arena_has() -> None:
    """Blocks that the arena has given up stand in the queue until their turn: past the bound the oldest go."""
    made = tiers(3)
    seal(made, names(0, 1, 2))
    (store,) = put(made, 1, names(0, 1, 2))
    assert isinstance(store, StoreBlocks)
    seal(made, names(3, 4))
    assert put(made, 2, names(3, 4)) == []
    seal(made, names(5, 6))
    assert ended(put(made, 3, names(5, 6))) == [], "the first still waits for what is being written"
    assert made.tiers[0].skipped == 3, "1, 2 and 3 are given up: their puts wait for them no longer"
    commands = answer(made, store, kept=True)
    assert ended(commands) == [1, 2]
    for _ in range(2):
        (store,) = [command for command in commands if isinstance(command, StoreBlocks)]
        commands = answer(made, store, kept=True)
    assert ended(commands) == [3]
    assert all(made.has(name) for name in names(0, 5, 6))


def test_only_a_put_is_written_in_runs() -> None:
    """Each run can be taken when it is there; what only becomes cached goes in batches as before."""
    pool = Tier(TierRules(name="pool", blocks_max=100, batch_blocks=4), LeastRecentlyUsed)
    made = Tiers(host=HostId("h"), arena=Blocks(80, LeastRecentlyUsed()), tiers=[pool])
    seal(made, names(*range(9)))
    made.arena.fresh = [block for name in names(5, 6, 7, 8) if (block := made.arena.find(name)) is not None]
    stores = [command for command in put(made, 1, names(0, 1, 2, 3, 4), 2) if isinstance(command, StoreBlocks)]
    assert [len(store.hashes) for store in stores] == [2, 2, 1, 4]
    first, *rest = stores
    assert ended(answer(made, first, kept=True)) == []
    assert [pool.has(name) for name in names(0, 1, 2)] == [True, True, False], "the first run can be taken"
    assert [ended(answer(made, store, kept=True)) for store in rest] == [[], [1], []]
