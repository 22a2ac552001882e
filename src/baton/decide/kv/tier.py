"""Metadata of one tier below an arena: its blocks, current writes and reads, and evictions. Holds no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.core.tier_messages import TierView
from baton.core.types import BlockHash, BlockId
from baton.decide.kv.blocks import BlockFacts, Blocks, EvictionOrder, Writes

KEEP_RATIO = 0.9
"""Decay of a read's weight per later read: about the last ten reads determine the estimate."""
DOUBT_RATIO = 0.98
"""Decay per read that was skipped as too slow. Without it a tier that was slow once would never be retried."""
_GIVEN_WEIGHT = 0.001
"""Weight of each of the two points that represent the configured speed. A measured read has weight 1."""
_GIVEN_BLOCKS = (1, 64)


@dataclass(slots=True)
class _Sums:
    """Weighted sums of a linear fit: of 1, n, n * n, t and n * t."""

    one: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    t: float = 0.0
    nt: float = 0.0

    def add(self, n: float, t: float, weight: float) -> None:
        self.one += weight
        self.n += weight * n
        self.nn += weight * n * n
        self.t += weight * t
        self.nt += weight * n * t

    def scale(self, ratio: float) -> None:
        self.one, self.n, self.nn = self.one * ratio, self.n * ratio, self.nn * ratio
        self.t, self.nt = self.t * ratio, self.nt * ratio


@dataclass(slots=True)
class TierSpeed:
    """Predicts the time of a read: a line through (blocks, seconds), where blocks queued before the read count too.

    Fitted by least squares of relative errors with decaying weights. It starts with the configured speed, which keeps a
    small weight: its two points determine a line even if all reads have one size.
    """

    latency_s: float
    """Time to the first byte."""
    block_s: float
    """Time per block."""
    _given: _Sums = field(default_factory=_Sums)
    _made: _Sums = field(default_factory=_Sums)

    def __post_init__(self) -> None:
        for blocks in _GIVEN_BLOCKS:
            self._given.add(blocks, self.load_s(blocks), _GIVEN_WEIGHT / blocks**2)

    def load_s(self, blocks: int) -> float:
        """Predict the time until the last of this many blocks is read."""
        return self.latency_s + blocks * self.block_s

    @property
    def is_measured(self) -> bool:
        """Whether a read was recorded. Until then, the speed is the configured one."""
        return self._made.one > 0.0

    def learn(self, blocks: int, took_s: float) -> None:
        """Record a read: its blocks, including those queued before it, and its duration."""
        self._made.scale(KEEP_RATIO)
        self._made.add(blocks, took_s, 1.0 / blocks**2)
        self._fit()

    def doubt(self) -> None:
        """Record a read that was skipped as too slow: reduce the weight of the measured reads slightly."""
        self._made.scale(DOUBT_RATIO)
        self._fit()

    def _fit(self) -> None:
        given, made = self._given, self._made
        one, n, nn = given.one + made.one, given.n + made.n, given.nn + made.nn
        t, nt = given.t + made.t, given.nt + made.nt
        spread = one * nn - n * n
        self.block_s = (one * nt - n * t) / spread
        self.latency_s = (t - n * self.block_s) / one
        if self.block_s < 0.0:
            self.block_s, self.latency_s = 0.0, t / one
        elif self.latency_s < 0.0:
            self.block_s, self.latency_s = nt / nn, 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Size, speed and limits of a tier."""

    name: str
    blocks_max: int
    is_sized: bool = True
    """False: the store decides how many blocks it keeps; `blocks_max` then bounds the metadata."""
    latency_s: float = 0.0
    """Assumed time to the first byte before the first read."""
    block_load_s: float = 0.0
    """Assumed time per block before the first read: its bytes / bandwidth."""
    load_s_max: float = 2.5
    """Reads with a longer predicted time are not started. The mover fails a read that takes twice as long."""
    shared_as: str = ""
    """Name of a store that several hosts share. They share its metadata too, so one host can read blocks that another
    has written. Empty: the store belongs to this host."""
    when: Writes = "cached"
    """Write blocks once no request uses them (`cached`), or as soon as they are sealed (`sealed`). `sealed` applies to
    all tiers of a host if one of them says so."""
    writing_blocks_max: int = 256
    """Maximum number of blocks of one host in current writes. They stay pinned in the arena."""
    loss: str = ""
    """Description of the rounding of its blocks, for `timings` of a response. Empty: they are exact."""
    waiting_blocks_max: int = 4096
    """Maximum number of blocks that wait to be written. Beyond it, the oldest waiting block is skipped."""
    batch_blocks: int = 64
    """Maximum number of blocks per write."""

    def move_s(self, blocks: int) -> float:
        """Predict the time to write or read this many blocks on an idle tier."""
        return self.latency_s + blocks * self.block_load_s if blocks else 0.0


class Tier:
    """The slots for blocks in one tier, and their hashes. A block has a slot from the start of its write.

    Eviction uses an eviction policy, as the arena does.
    """

    def __init__(self, rules: TierRules, eviction: Callable[[], EvictionOrder]) -> None:
        self.rules = rules
        self.slots = Blocks(rules.blocks_max, eviction())
        self._writing: set[BlockHash] = set()
        self.speed = TierSpeed(rules.latency_s, rules.block_load_s)
        self.blocks_max = rules.blocks_max
        """Number of slots. Lower than in the rules after the store has reported less room."""
        self.loading = 0
        """Number of blocks in current reads."""
        self.stored = self.refused = self.loaded = self.missed = self.skipped = 0
        """Counters of blocks, as reported in `TierView`."""

    @property
    def name(self) -> str:
        return self.rules.name

    @property
    def writing(self) -> int:
        """Number of blocks in current writes."""
        return len(self._writing)

    def has(self, block_hash: BlockHash) -> bool:
        """Return whether the block can be read."""
        return block_hash not in self._writing and self.slots.find(block_hash) is not None

    def knows(self, block_hash: BlockHash) -> bool:
        """Return whether the block can be read or is being written."""
        return self.slots.find(block_hash) is not None

    @property
    def readable_blocks(self) -> int:
        """Maximum number of blocks of one more read that still ends within `load_s_max`."""
        left_s = self.rules.load_s_max - self.speed.load_s(self.loading)
        if left_s <= 0.0:
            return 0
        block_s = self.speed.block_s
        return int(left_s / block_s) if block_s * self.rules.blocks_max > left_s else self.rules.blocks_max

    def touch(self, block_hash: BlockHash) -> None:
        """Record a use of the block, for eviction."""
        slot = self.slots.find(block_hash)
        if slot is not None and block_hash not in self._writing:
            self.slots.pin((slot,))
            self.slots.unpin((slot,))

    def begin_write(self, facts: BlockFacts) -> tuple[BlockId, list[BlockHash]] | None:
        """Reserve a slot for a block. Return it and the hashes evicted for it. None: every slot is pinned."""
        if not self.slots.available:
            return None
        (slot,), gone = self.slots.take(1)
        self.slots.seal(slot, replace(facts, is_backed=False))
        self._writing.add(facts.block_hash)
        return slot, gone

    def end_write(self, hashes: Sequence[BlockHash], slots: Sequence[BlockId], kept: Sequence[bool]) -> None:
        """End a write. `kept`: whether the store has kept each block."""
        self._writing.difference_update(hashes)
        for slot, is_kept in zip(slots, kept, strict=True):
            if not is_kept:
                self.slots.forget(slot)
        self.stored += sum(kept)
        self.refused += len(kept) - sum(kept)
        self.slots.unpin(slots)

    def begin_load(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Pin blocks of the tier for a read. Return their slots."""
        slots = [slot for block_hash in hashes if (slot := self.slots.find(block_hash)) is not None]
        self.slots.pin(slots)
        self.loading += len(slots)
        return slots

    def end_load(self, slots: Sequence[BlockId], whole: Sequence[bool]) -> list[BlockHash]:
        """End a read. Return the hashes of blocks that were missing or damaged; they are removed from the tier."""
        self.loading -= len(slots)
        missed = [slot for slot, is_whole in zip(slots, whole, strict=True) if not is_whole]
        lost = [block_hash for slot in missed if (block_hash := self.slots.forget(slot)) is not None]
        self.loaded += len(slots) - len(missed)
        self.missed += len(missed)
        self.slots.unpin(slots)
        return lost

    def fill(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Record blocks that the store already has, oldest first. Return the hashes that do not fit."""
        gone: list[BlockHash] = []
        for block_hash in hashes:
            if self.knows(block_hash):
                continue
            begun = self.begin_write(BlockFacts(block_hash))
            if begun is None:
                gone.append(block_hash)
                continue
            slot, evicted = begun
            gone += evicted
            self._writing.discard(block_hash)
            self.slots.unpin((slot,))
        return gone

    def shrink(self, blocks_max: int) -> list[BlockHash]:
        """Reduce the number of slots, except for pinned ones. Return the evicted hashes."""
        count = min(self.blocks_max - max(0, blocks_max), self.slots.available)
        if count <= 0:
            return []
        self.blocks_max -= count
        unused = min(count, self.slots.unused)
        self.slots.total -= unused
        self.slots.unused -= unused
        _, gone = self.slots.take(count - unused)  # pinned for ever, so that they are not used again
        return gone

    def view(self) -> TierView:
        return TierView(
            tier=self.name,
            blocks_total=self.blocks_max if self.rules.is_sized else self.slots.hashed,
            blocks_cached=self.slots.hashed - self.writing,
            blocks_writing=self.writing,
            stored_blocks=self.stored,
            refused_blocks=self.refused,
            loaded_blocks=self.loaded,
            missed_blocks=self.missed,
            skipped_blocks=self.skipped,
        )


def tier_named(tiers: Iterable[Tier], name: str) -> Tier | None:
    """Return the tier with this name, or None."""
    return next((tier for tier in tiers if tier.name == name), None)
