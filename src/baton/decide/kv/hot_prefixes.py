"""The hot prefixes of an arena: chains of cached blocks that are worth a copy to another host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.prefixes import SealedBlock
from baton.core.types import BlockHash
from baton.decide.kv.blocks import BlockFacts, Blocks


@dataclass(frozen=True, slots=True)
class Prefix:
    """A chain of sealed blocks from the first block of a prompt on."""

    hashes: tuple[BlockHash, ...]
    tenant: str
    """Tenant that sealed its last block."""


@dataclass(frozen=True, slots=True)
class HotPrefixes:
    """Finds the prefixes of an arena whose blocks were used most."""

    blocks: Blocks

    def sealed(self, blocks_max: int) -> list[SealedBlock]:
        """Return at most `blocks_max` sealed blocks, pinned or not. Blocks that more requests used come first."""
        ranked = sorted(self.blocks.sealed, key=lambda pair: (-pair[1].uses, pair[1].start_tokens, pair[1].block_hash))
        return [
            SealedBlock(block, facts.block_hash, facts.parent, facts.start_tokens, facts.tenant)
            for block, facts in ranked[:blocks_max]
        ]

    def restore(self, kept: Sequence[SealedBlock]) -> None:
        """Cache blocks of an arena that the host has kept. Requires that no other block is in use or cached.

        Of each prompt, the deepest block is evicted first. The blocks are not written to tiers, which may have them.
        """
        blocks, fresh = self.blocks, self.blocks.fresh
        blocks.fresh = None
        taken, _ = blocks.take(blocks.total)
        for each in kept:
            blocks.seal(each.block, BlockFacts(each.block_hash, each.parent, each.start_tokens, each.tenant))
        first_tokens = {each.block: each.start_tokens for each in kept}
        blocks.unpin(sorted(taken, key=lambda block: first_tokens.get(block, -1)))
        blocks.fresh = fresh

    def chains(self, blocks_max: int, uses_min: int = 1) -> list[Prefix]:
        """Return prefixes of at most `blocks_max` different blocks in all. Blocks that more requests used come first.

        A block whose predecessors are not all in the arena is left out: it cannot be used. So is one that fewer than
        `uses_min` requests used.
        """
        facts = {each.block_hash: each for _, each in self.blocks.sealed}
        hot = [each for each in facts.values() if each.uses >= uses_min]
        ranked = sorted(hot, key=lambda each: (-each.uses, each.start_tokens, each.block_hash))
        chosen: dict[BlockHash, BlockFacts] = {}
        # Blocks stay unfit: a later choice of some of their missing blocks uses up as many of `blocks_max`.
        unfit = set[BlockHash]()
        for each in ranked:
            missing = _missing(each, facts, chosen, unfit, blocks_max - len(chosen))
            if missing is None:
                unfit.add(each.block_hash)
            else:
                chosen.update((block.block_hash, block) for block in missing)
        parents = {block.parent for block in chosen.values()}
        ends = [block for block in chosen.values() if block.block_hash not in parents]
        return [Prefix(_chain(end, chosen), end.tenant) for end in ends]


def _missing(
    last: BlockFacts,
    facts: dict[BlockHash, BlockFacts],
    chosen: dict[BlockHash, BlockFacts],
    unfit: set[BlockHash],
    blocks_max: int,
) -> list[BlockFacts] | None:
    """Return this block and those of its predecessors that are not chosen.

    None: they are more than `blocks_max`, one of them is unfit, or one is not in the arena.
    """
    missing: list[BlockFacts] = []
    block: BlockFacts | None = last
    while block is not None and block.block_hash not in chosen:
        if block.block_hash in unfit or len(missing) == blocks_max:
            return None
        missing.append(block)
        if block.parent is None:
            return missing if block.start_tokens == 0 else None
        block = facts.get(block.parent)
    return None if block is None else missing


def _chain(end: BlockFacts, chosen: dict[BlockHash, BlockFacts]) -> tuple[BlockHash, ...]:
    chain = [end]
    while (parent := chain[-1].parent) is not None:
        chain.append(chosen[parent])
    return tuple(block.block_hash for block in reversed(chain))
