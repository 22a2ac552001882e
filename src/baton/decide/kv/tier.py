"""One tier below an arena: which blocks it has, which it is given or asked for now, which it gives up. No bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.core.keeping import TierView
from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts, Blocks, EvictionOrder, Writes
from baton.decide.kv.tier_speed import TierSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """How large a tier is, how fast, and how much of it is used at once."""

    name: str
    blocks_max: int
    is_sized: bool = True
    """False: the other side decides how many blocks it keeps; so many are remembered."""
    latency_s: float = 0.0
    """From asking for a block to its first byte, as far as is known before the first read."""
    block_load_s: float = 0.0
    """What each block adds: its bytes by the tier's bytes/s. Known as well."""
    load_s_max: float = 2.5
    """Longest read that is begun: one that lasts twice as long is answered for by whoever moves the bytes."""
    shared_as: str = ""
    """Names the store where it is one of several hosts, which then share its book: what one has put there, another can
    take. Empty: it is this host's alone."""
    when: Writes = "cached"
    """Blocks are written when nobody uses them any more, or as soon as they are sealed. The eagerest of a host's tiers
    decides for all of them."""
    writing_blocks_max: int = 256
    """Blocks of one host that are written at once, and so cannot be given up by its arena."""
    waiting_blocks_max: int = 4096
    """Blocks that wait to be written. Past that, the one that waits longest is not written."""
    batch_blocks: int = 64
    """Most blocks of one write."""

    def move_s(self, blocks: int) -> float:
        """Predict how long it takes to write or read so many blocks, with nothing else under way."""
        return self.latency_s + blocks * self.block_load_s if blocks else 0.0


class Tier:
    """Places of a tier, each with the name of what lies there. A block has a place from the moment it is written.

    The order in which blocks are given up is an eviction policy, as the arena's.
    """

    def __init__(self, rules: TierRules, eviction: Callable[[], EvictionOrder]) -> None:
        self.rules = rules
        self.places = Blocks(rules.blocks_max, eviction())
        self._writing: set[BlockHash] = set()
        self.speed = TierSpeed(rules.latency_s, rules.block_load_s)
        self.blocks_max = rules.blocks_max
        """Places that there are: fewer than the rules say, once its store has told so."""
        self.loading = 0
        """Blocks that are being read."""
        self.stored = self.refused = self.loaded = self.missed = self.skipped = 0
        """See `TierView`."""

    @property
    def name(self) -> str:
        return self.rules.name

    @property
    def writing(self) -> int:
        """Blocks that are being written."""
        return len(self._writing)

    def has(self, name: BlockHash) -> bool:
        """The block can be read."""
        return name not in self._writing and self.places.find(name) is not None

    def knows(self, name: BlockHash) -> bool:
        """The block can be read, or is being written."""
        return self.places.find(name) is not None

    @property
    def readable_blocks(self) -> int:
        """Count the blocks that one read may ask for, so that it ends in time."""
        left_s = self.rules.load_s_max - self.speed.load_s(self.loading)
        if left_s <= 0.0:
            return 0
        block_s = self.speed.block_s
        return int(left_s / block_s) if block_s * self.rules.blocks_max > left_s else self.rules.blocks_max

    def touch(self, name: BlockHash) -> None:
        """Note that a request has used the block."""
        place = self.places.find(name)
        if place is not None and name not in self._writing:
            self.places.pin((place,))
            self.places.unpin((place,))

    def begin_write(self, facts: BlockFacts) -> tuple[BlockId, list[BlockHash]] | None:
        """Take a place for a block. Returns it and what is given up for it; None: every place is in use."""
        if not self.places.available:
            return None
        (place,), gone = self.places.take(1)
        self.places.seal(place, replace(facts, is_backed=False))
        self._writing.add(facts.name)
        return place, gone

    def end_write(self, names: Sequence[BlockHash], places: Sequence[BlockId], kept: Sequence[bool]) -> None:
        """The blocks are there, or are not kept."""
        self._writing.difference_update(names)
        for place, is_kept in zip(places, kept, strict=True):
            if not is_kept:
                self.places.forget(place)
        self.stored += sum(kept)
        self.refused += len(kept) - sum(kept)
        self.places.unpin(places)

    def begin_load(self, names: Iterable[BlockHash]) -> list[BlockId]:
        """Keep blocks that it has until they are read. Returns their places."""
        places = [place for name in names if (place := self.places.find(name)) is not None]
        self.places.pin(places)
        self.loading += len(places)
        return places

    def end_load(self, places: Sequence[BlockId], whole: Sequence[bool]) -> list[BlockHash]:
        """Let go of what was read. Returns those that this has shown to be gone or damaged, and that are forgotten."""
        self.loading -= len(places)
        missed = [place for place, is_whole in zip(places, whole, strict=True) if not is_whole]
        lost = [name for place in missed if (name := self.places.forget(place)) is not None]
        self.loaded += len(places) - len(missed)
        self.missed += len(missed)
        self.places.unpin(places)
        return lost

    def fill(self, names: Iterable[BlockHash]) -> list[BlockHash]:
        """Note what an earlier run has left, oldest first. Returns what does not fit."""
        gone: list[BlockHash] = []
        for name in names:
            if self.knows(name):
                continue
            begun = self.begin_write(BlockFacts(name))
            if begun is None:
                gone.append(name)
                continue
            place, evicted = begun
            gone += evicted
            self._writing.discard(name)
            self.places.unpin((place,))
        return gone

    def shrink(self, blocks_max: int) -> list[BlockHash]:
        """Have fewer places, as far as the rest is not in use now. Returns what is given up for that."""
        count = min(self.blocks_max - max(0, blocks_max), self.places.available)
        if count <= 0:
            return []
        _, gone = self.places.take(count)  # for ever
        self.blocks_max -= count
        return gone

    def view(self) -> TierView:
        return TierView(
            tier=self.name,
            blocks_total=self.blocks_max if self.rules.is_sized else self.places.named,
            blocks_cached=self.places.named - self.writing,
            blocks_writing=self.writing,
            stored_blocks=self.stored,
            refused_blocks=self.refused,
            loaded_blocks=self.loaded,
            missed_blocks=self.missed,
            skipped_blocks=self.skipped,
        )


def tier_named(tiers: Iterable[Tier], name: str) -> Tier | None:
    """Find a tier. None: there is none of that name."""
    return next((tier for tier in tiers if tier.name == name), None)
