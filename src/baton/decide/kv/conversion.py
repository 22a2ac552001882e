"""Conversion between KV layouts: two layouts, two block tables and a range of tokens give a plan of copies.

Both layouts are arrays of the same cells (one head of one token in one plane of one layer). The overlap of a source
block with target blocks is computed once per alignment; the blocks of a long prompt reuse it at other offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from msgspec import Struct

from baton.core.types import BlockId
from baton.decide.kv.copy_plan import CopyPlan, Landing, Loop, Read, StridedCopy
from baton.decide.kv.identity import KVIdentity
from baton.decide.kv.layout import KVLayout, loss
from baton.decide.kv.overlap import Cutting, Part, add_read, folded, part_of


class KVForm(Struct, frozen=True, kw_only=True):
    """Model identity and layout of a host's KV. Two hosts exchange it when they connect."""

    identity: KVIdentity
    layout: KVLayout


class IncompatibleKV(Struct, frozen=True):
    """No conversion exists between two KV forms."""

    reason: str
    """Error message: the property that differs, both values, and what to do."""


def negotiate(source: KVForm, target: KVForm, *, lossy_allowed: bool) -> Conversion | IncompatibleKV:
    """Return the conversion from one host's KV to another's, or the reason why none exists.

    `lossy_allowed`: the configuration allows rounding (`hosts.lossy`).
    """
    ours, theirs = source.layout, target.layout
    problems = [*source.identity.disagreements(target.identity), *_disagreements(ours, theirs)]
    if problems:
        return IncompatibleKV(
            f"cannot convert KV of {source.identity.model} for {target.identity.model}: {'; '.join(problems)}; "
            "start both hosts with the same model files"
        )
    problems = [*ours.problems(), *theirs.problems()]
    if problems:
        return IncompatibleKV(f"cannot convert KV: {'; '.join(problems)}")
    lost = loss(ours.dtype, theirs.dtype)
    pair = f"the source keeps it in {ours.dtype}, the target in {theirs.dtype}"
    if lost is None:
        return IncompatibleKV(f"cannot convert KV: {pair}, and no conversion exists; give both hosts one --kv-dtype")
    if lost and not lossy_allowed:
        return IncompatibleKV(
            f"cannot convert KV without loss: {pair}; give both one --kv-dtype, or allow lossy conversion"
        )
    return Conversion(ours, theirs, lost)


def _disagreements(source: KVLayout, target: KVLayout) -> list[str]:
    pairs = (
        ("layers", source.layers, target.layers),
        ("KV heads", source.kv_heads, target.kv_heads),
        ("values per head", source.head_dim, target.head_dim),
        ("planes", source.planes, target.planes),
    )
    return [f"{what} {ours} and {theirs}" for what, ours, theirs in pairs if ours != theirs]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion from one layout to another. Makes the plan of each copy."""

    source: KVLayout
    target: KVLayout
    loss: str = ""
    """Description of the rounding, for `timings` of a response. Empty: lossless."""
    cutting: Cutting = field(default_factory=Cutting)
    _whole: dict[int, Part] = field(default_factory=dict[int, Part], compare=False, repr=False)
    """Cache of parts for whole source blocks, by the target slot of their first token."""

    def plan(
        self,
        source_blocks: Sequence[BlockId],
        target_blocks: Sequence[BlockId],
        tokens: range,
        *,
        tables_from: int = 0,
    ) -> CopyPlan:
        """Return the plan that copies the KV of `tokens` (positions in the request, not empty) and nothing else.

        Each table begins with the block that holds token `tables_from` on its host. A partial block needs one piece
        per plane; see `spare_end`.
        """
        for where, layout, table in (("source", self.source, source_blocks), ("target", self.target, target_blocks)):
            first = tables_from // layout.block_tokens * layout.block_tokens
            held = range(first, first + len(table) * layout.block_tokens)
            assert held.start <= tokens.start < tokens.stop <= held.stop, f"{tokens} of {held} in the {where}'s table"
        assembly = _Assembly(self.source, self.target, source_blocks, target_blocks, self.cutting.joined_bytes)
        source_first, target_first = (tables_from // layout.block_tokens for layout in (self.source, self.target))
        block_tokens = self.source.block_tokens
        for index in range(tokens.start // block_tokens, -(-tokens.stop // block_tokens)):
            start = index * block_tokens
            slots = range(max(0, tokens.start - start), min(block_tokens, tokens.stop - start))
            target_index, target_slot = divmod(start + slots.start, self.target.block_tokens)
            assembly.add(self._part(slots, target_slot), index - source_first, target_index - target_first)
        return assembly.finish()

    def spare_end(self, end: int) -> int:
        """Return `end`, rounded up to the next end of a block. The rest of the last target block must be unused.

        A whole block is one run; a partial block needs one piece per plane.
        """
        return min(-(-end // layout.block_tokens) * layout.block_tokens for layout in (self.source, self.target))

    def _part(self, slots: range, target_slot: int) -> Part:
        if len(slots) < self.source.block_tokens:
            return part_of(self.source, self.target, slots, target_slot, self.cutting)
        if target_slot not in self._whole:
            self._whole[target_slot] = part_of(self.source, self.target, slots, target_slot, self.cutting)
        return self._whole[target_slot]


@dataclass(slots=True)
class _Assembly:
    """Builds a plan: shifts parts to the offsets of their blocks, and joins adjacent runs."""

    source: KVLayout
    target: KVLayout
    source_blocks: Sequence[BlockId]
    target_blocks: Sequence[BlockId]
    joined_bytes: int
    """Maximum size of joined copies; see `Cutting`."""
    parts: dict[int, Part] = field(default_factory=dict[int, Part])
    """The added parts by `id()`. The references keep these ids unique."""
    reads: list[Read] = field(default_factory=list[Read])
    landings: list[Landing] = field(default_factory=list[Landing])
    staging_bytes: int = 0
    alike: dict[tuple[int, int], list[StridedCopy]] = field(default_factory=dict[tuple[int, int], list[StridedCopy]])
    """Staged copies that differ only in their offsets, by part and position in it."""

    def add(self, part: Part, source_index: int, target_index: int) -> None:
        """Add a part at the offsets of its source and target blocks, given by index in the tables."""
        self.parts[id(part)] = part
        base_bytes = self.source_blocks[source_index] * self.source.block_bytes
        for read in part.reads:
            add_read(self.reads, base_bytes + read.offset_bytes, read.size_bytes)
        if part.staged_bytes:
            self._land(Landing(self.staging_bytes, part.staged_bytes, base_bytes, staged=True))
        for number, (block, copy) in enumerate(part.copies):
            source_bytes = base_bytes + copy.source_bytes
            target_bytes = self.target_blocks[target_index + block] * self.target.block_bytes + copy.target_bytes
            if part.staged_bytes:
                staged_bytes = self.staging_bytes + copy.staged_bytes
                shifted = StridedCopy(source_bytes, staged_bytes, target_bytes, copy.cells, copy.loops)
                self.alike.setdefault((id(part), number), []).append(shifted)
            else:
                self._land(Landing(target_bytes, copy.cells * self.source.head_bytes, source_bytes, staged=False))
        self.staging_bytes += part.staged_bytes

    def _land(self, landing: Landing) -> None:
        """Append a landing, or extend the last one if it is adjacent."""
        if self.landings:
            last = self.landings[-1]
            follows = last.offset_bytes + last.size_bytes == landing.offset_bytes
            follows_there = last.source_bytes + last.size_bytes == landing.source_bytes
            if last.staged == landing.staged and follows and (landing.staged or follows_there):
                size_bytes = last.size_bytes + landing.size_bytes
                landing = Landing(last.offset_bytes, size_bytes, last.source_bytes, last.staged)
                self.landings.pop()
        self.landings.append(landing)

    def finish(self) -> CopyPlan:
        cell_bytes = self.source.head_bytes, self.target.head_bytes
        copies = [copy for alike in self.alike.values() for copy in _joined(alike, cell_bytes, self.joined_bytes)]
        return CopyPlan(
            reads=tuple(self.reads),
            landings=tuple(self.landings),
            copies=tuple(sorted(copies, key=lambda copy: copy.staged_bytes)),
            staging_bytes=self.staging_bytes,
            head_dim=self.source.head_dim,
            source_dtype=self.source.dtype,
            target_dtype=self.target.dtype,
        )


def _joined(alike: list[StridedCopy], cell_bytes: tuple[int, int], bytes_max: int) -> list[StridedCopy]:
    """Join consecutive copies at a constant distance into one copy with an additional loop."""
    joined: list[StridedCopy] = []
    size_bytes = alike[0].cells * prod(loop.count for loop in alike[0].loops) * cell_bytes[0]
    most = bytes_max // size_bytes
    if most < 2:
        return alike
    at = 0
    while at < len(alike):
        first, end = alike[at], at + 1
        apart = _apart(first, alike[end]) if end < len(alike) else (0, 0, 0)
        while end < min(len(alike), at + most) and _apart(alike[end - 1], alike[end]) == apart:
            end += 1
        loops = (*reversed(first.loops), Loop(end - at, *apart))
        cells, outer_first = folded(loops, first.cells, cell_bytes)
        joined.append(StridedCopy(first.source_bytes, first.staged_bytes, first.target_bytes, cells, outer_first))
        at = end
    return joined


def _apart(one: StridedCopy, other: StridedCopy) -> tuple[int, int, int]:
    return (
        other.source_bytes - one.source_bytes,
        other.staged_bytes - one.staged_bytes,
        other.target_bytes - one.target_bytes,
    )
