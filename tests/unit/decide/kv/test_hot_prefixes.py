"""The prefixes that a leaving host hands over: whole chains, the most used ones first, within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.core.types import BlockHash
from baton.decide.kv.blocks import BlockFacts, Blocks
from baton.decide.kv.hot_prefixes import HotPrefixes
from baton.decide.policy.eviction import LeastRecentlyUsed


def arena(*chains: tuple[str, int, str], total: int = 32) -> Blocks:
    """Return blocks with these chains: a letter per block, its uses, and its tenant. Shared beginnings are shared."""
    blocks = Blocks(total, LeastRecentlyUsed())
    for name, uses, tenant in chains:
        for depth in range(len(name)):
            own, parent = name_of(name[: depth + 1]), name_of(name[:depth]) if depth else None
            known = blocks.find(own)
            if known is None:
                (block,), _ = blocks.take(1)
                assert blocks.seal(block, BlockFacts(own, parent, 4 * depth, tenant))
                known = block
                blocks.unpin([block])
            for _ in range(uses - 1):
                blocks.pin([known])
                blocks.unpin([known])
    return blocks


def name_of(name: str) -> BlockHash:
    return BlockHash(name.encode())


def chains(blocks: Blocks, blocks_max: int) -> list[tuple[Sequence[BlockHash], str]]:
    return [(prefix.hashes, prefix.tenant) for prefix in HotPrefixes(blocks).chains(blocks_max)]


def chain(name: str) -> tuple[BlockHash, ...]:
    return tuple(name_of(name[: length + 1]) for length in range(len(name)))


def test_every_branch_is_a_chain_from_its_first_block() -> None:
    found = chains(arena(("sab", 1, "x"), ("scd", 1, "y")), 32)
    assert sorted(found) == [(chain("sab"), "x"), (chain("scd"), "y")]


def test_the_most_used_blocks_come_first_and_the_bound_holds() -> None:
    """Three blocks fit: the shared beginning and the conversation that was used three times, not the longer one."""
    blocks = arena(("sabcd", 1, "x"), ("se", 3, "y"), ("f", 2, "z"))
    assert chains(blocks, 3) == [(chain("se"), "y"), (chain("f"), "z")]
    assert chains(blocks, 0) == []
    assert sum(len(hashes) for hashes, _ in chains(blocks, 4)) <= 5


def test_blocks_that_one_request_used_are_not_copied_ahead_of_demand() -> None:
    """Three requests used the shared beginning, and one of them went on."""
    blocks = arena(("s", 2, "x"), ("sab", 1, "x"), ("f", 1, "z"))
    assert [prefix.hashes for prefix in HotPrefixes(blocks).chains(32, uses_min=2)] == [chain("s")]


def test_a_chain_without_its_beginning_is_left_out() -> None:
    """A successor of an evicted block cannot be used, nor one whose predecessor was never known."""
    blocks = arena(("ab", 1, "x"), ("c", 1, "x"))
    gone = blocks.find(name_of("a"))
    assert gone is not None
    blocks.forget(gone)
    (block,), _ = blocks.take(1)
    assert blocks.seal(block, BlockFacts(name_of("?"), None, 8))
    assert chains(blocks, 32) == [(chain("c"), "x")]


def plainly_chosen(blocks: Blocks, blocks_max: int) -> set[BlockHash]:
    """Choose blocks as `HotPrefixes.chains` does, with a walk to the root for every block."""
    facts = {each.block_hash: each for _, each in blocks.sealed}
    chosen = set[BlockHash]()
    for each in sorted(facts.values(), key=lambda each: (-each.uses, each.start_tokens, each.block_hash)):
        missing, parent = list[BlockHash](), each.block_hash
        while parent is not None and parent not in chosen:
            missing.append(parent)
            parent = facts[parent].parent
        if len(chosen) + len(missing) <= blocks_max:
            chosen.update(missing)
    return chosen


def test_blocks_that_do_not_fit_are_not_looked_at_again() -> None:
    """The outcome is that of a walk to the root for every block, which took seconds with prompts of 100,000 tokens."""
    draw = Random(5)
    for _ in range(60):
        names = ["".join(draw.choice("abc") for _ in range(draw.randint(1, 7))) for _ in range(6)]
        blocks = arena(*((name, draw.randint(1, 4), "x") for name in names), total=64)
        for blocks_max in range(0, 30, 3):
            found = {block for hashes, _ in chains(blocks, blocks_max) for block in hashes}
            assert found == plainly_chosen(blocks, blocks_max)


def test_a_kept_arena_has_its_blocks_again_and_evicts_the_deepest_first() -> None:
    """Pinned blocks are kept too, unsealed ones are not: INV-4 holds, and nothing is written to tiers again."""
    before = arena(("sab", 2, "x"), ("sc", 1, "y"), total=8)
    used, tail = before.find(name_of("sa")), before.take(1)[0]
    assert used is not None
    before.pin([used])
    kept = HotPrefixes(before).sealed(8)
    assert [block.block for block in kept if block.block in tail] == []
    after = Blocks(8, LeastRecentlyUsed())
    after.fresh = []
    HotPrefixes(after).restore(kept)
    after.check([0] * 8)
    assert (after.free, after.cached, after.fresh) == (4, 4, [])
    assert after.hit(chain("sab"), None, 4).blocks == [before.find(each) for each in chain("sab")]
    facts = after.facts(used)
    assert facts is not None
    assert (facts.parent, facts.start_tokens, facts.tenant) == (name_of("s"), 4, "x")
    _, evicted = after.take(5)
    assert evicted == [name_of("sab")]


def test_the_most_used_blocks_of_a_large_arena_are_kept() -> None:
    kept = HotPrefixes(arena(("ab", 3, "x"), ("c", 1, "x"))).sealed(2)
    assert sorted(block.block_hash for block in kept) == [name_of("a"), name_of("ab")]
