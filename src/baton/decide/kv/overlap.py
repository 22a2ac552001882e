"""Overlap of a source block with target blocks: the bytes to read, and the destination of each cell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.decide.kv.copy_plan import Loop, Read, StridedCopy
from baton.decide.kv.layout import KVLayout, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Thresholds for merging reads and copies. A transport pays 1 to 5 us per read, at 2 to 7 GB/s."""

    gap_bytes: int = 16 * 1024
    """Reads with a gap up to this size inside a block are merged."""
    in_place_bytes: int = 64 * 1024
    """Runs of at least this mean size are received in place. Smaller runs are staged, which needs fewer reads."""
    joined_bytes: int = 1024 * 1024
    """Maximum size of joined copies. Copies for several ranks read the same blocks, which stay in the CPU cache."""


class BlockCopy(NamedTuple):
    """A copy from one source block into one target block. Offsets count from the start of each block."""

    target_block: int
    """Index, counted from the first target block of the part."""
    copy: StridedCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Reads and copies for some slots of a source block. Offsets count from the start of the block or its staging."""

    reads: tuple[Read, ...]
    copies: tuple[BlockCopy, ...]
    staged_bytes: int
    """0: every copy is one run, in the order of the reads, and is received in place."""


class _Lattice(NamedTuple):
    """Offsets of the cells of a shard: an origin, and the distances between planes, slots of the block and heads."""

    origin_bytes: int
    plane_bytes: int
    slot_bytes: int
    head_bytes: int

    def at(self, plane: int, slot: int, head: int) -> int:
        return self.origin_bytes + plane * self.plane_bytes + slot * self.slot_bytes + head * self.head_bytes


@dataclass(frozen=True, slots=True)
class _Slab:
    """The runs of some slots of a shard: their number, size, and distance in the block and in the staging buffer."""

    count: int
    size_bytes: int
    apart_bytes: int
    staged_apart_bytes: int

    @property
    def staged_bytes(self) -> int:
        return (self.count - 1) * self.staged_apart_bytes + self.size_bytes


def part_of(source: KVLayout, target: KVLayout, slots: range, target_slot: int, cutting: Cutting) -> Part:
    """Return reads and copies for `slots` of a source block. The first slot maps to `target_slot` of a target block."""
    reads: list[Read] = []
    copies: list[BlockCopy] = []
    staged_bytes = 0
    for shard in _one_holder_each(source):
        held = _shared(slots, shard.tokens)
        if not held:
            continue
        slab = _slab(source, shard, held, cutting.gap_bytes)
        _add_reads(reads, slab, _lattice(source, shard).at(0, held.start, 0))
        staged = _staged_lattice(source, slab, held.start, staged_bytes)
        copies += _copies(source, target, shard, staged, held, target_slot + held.start - slots.start)
        staged_bytes += slab.staged_bytes
    runs = _as_runs(source, target, copies)
    size_bytes = sum(run.copy.cells for run in runs) * source.head_bytes
    if runs and (len(runs) <= len(reads) or size_bytes >= len(runs) * cutting.in_place_bytes):
        return Part(reads=_reads_of(runs, source.head_bytes), copies=tuple(runs), staged_bytes=0)
    return Part(reads=tuple(reads), copies=tuple(copies), staged_bytes=staged_bytes)


def folded(loops: Iterable[Loop], cells: int, cell_bytes: tuple[int, int]) -> tuple[int, tuple[Loop, ...]]:
    """Merge loops that are contiguous in all memories. Takes loops innermost first, returns them outermost first.

    `cells`: length of the innermost run; returned with the loops that became part of it. `cell_bytes`: of source and
    target.
    """
    kept: list[Loop] = []
    source_bytes, target_bytes = cell_bytes
    for loop in loops:
        count, *apart = loop.count, loop.source_bytes, loop.staged_bytes, loop.target_bytes
        if count == 1:
            continue
        if not kept and apart == [cells * source_bytes, cells * source_bytes, cells * target_bytes]:
            cells *= count
        elif kept and apart == [kept[-1].count * size for size in _apart(kept[-1])]:
            kept[-1] = Loop(kept[-1].count * count, *_apart(kept[-1]))
        else:
            kept.append(loop)
    return cells, tuple(reversed(kept))


def _apart(loop: Loop) -> tuple[int, int, int]:
    return loop.source_bytes, loop.staged_bytes, loop.target_bytes


def _one_holder_each(layout: KVLayout) -> list[Shard]:
    """Return one shard per distinct set of layers, heads and tokens: replicas hold the same bytes."""
    holders = {(shard.layers, shard.heads, shard.tokens): shard for shard in reversed(layout.shards)}
    return sorted(holders.values(), key=lambda shard: shard.offset_bytes)


def _lattice(layout: KVLayout, shard: Shard) -> _Lattice:
    cell_bytes, heads, tokens = layout.head_bytes, len(shard.heads), len(shard.tokens)
    plane_bytes = tokens * heads * cell_bytes
    by_token = layout.order == "token_major"
    slot_bytes, head_bytes = (heads * cell_bytes, cell_bytes) if by_token else (cell_bytes, tokens * cell_bytes)
    return _Lattice(shard.offset_bytes - shard.tokens.start * slot_bytes, plane_bytes, slot_bytes, head_bytes)


def _slab(layout: KVLayout, shard: Shard, slots: range, gap_bytes: int) -> _Slab:
    """Return the runs of some slots in a shard: one per plane, or one per plane and head if head-major."""
    heads, cell_bytes = len(shard.heads), layout.head_bytes
    row_bytes = heads * cell_bytes if layout.order == "token_major" else cell_bytes
    size_bytes, apart_bytes = len(slots) * row_bytes, len(shard.tokens) * row_bytes
    count = shard.size_bytes // apart_bytes
    reads_gaps = apart_bytes - size_bytes <= gap_bytes
    return _Slab(count, size_bytes, apart_bytes, apart_bytes if reads_gaps else size_bytes)


def _add_reads(reads: list[Read], slab: _Slab, start: int) -> None:
    if slab.staged_apart_bytes == slab.apart_bytes:
        add_read(reads, start, slab.staged_bytes)
        return
    for run in range(slab.count):
        add_read(reads, start + run * slab.apart_bytes, slab.size_bytes)


def add_read(reads: list[Read], offset_bytes: int, size_bytes: int) -> None:
    """Append a read, or extend the last one if it is adjacent."""
    if reads and reads[-1].offset_bytes + reads[-1].size_bytes == offset_bytes:
        last = reads.pop()
        offset_bytes, size_bytes = last.offset_bytes, last.size_bytes + size_bytes
    reads.append(Read(offset_bytes, size_bytes))


def _staged_lattice(layout: KVLayout, slab: _Slab, first_slot: int, staged_bytes: int) -> _Lattice:
    """Return the offsets of a slab's cells in the staging buffer, starting at `staged_bytes`."""
    heads, cell_bytes, apart_bytes = layout.rank_heads, layout.head_bytes, slab.staged_apart_bytes
    if layout.order == "token_major":
        slot_bytes = heads * cell_bytes
        return _Lattice(staged_bytes - first_slot * slot_bytes, apart_bytes, slot_bytes, cell_bytes)
    return _Lattice(staged_bytes - first_slot * cell_bytes, heads * apart_bytes, cell_bytes, apart_bytes)


def _copies(
    source: KVLayout, target: KVLayout, shard: Shard, staged: _Lattice, slots: range, target_slot: int
) -> list[BlockCopy]:
    """Return the copies of a source shard's cells to every target rank that holds them, per target block."""
    found: list[BlockCopy] = []
    for target_block, slot, there in _split_at_blocks(slots, target_slot, target.block_tokens):
        for holder in target.shards:
            layers = _shared(shard.layers, holder.layers)
            heads = _shared(shard.heads, holder.heads)
            tokens = _shared(there, holder.tokens)
            if not layers or not heads or not tokens:
                continue
            of_source, of_target = _lattice(source, shard), _lattice(target, holder)
            planes = len(layers) * source.planes
            plane, head = (layers[0] - shard.layers[0]) * source.planes, heads[0] - shard.heads[0]
            first = (layers[0] - holder.layers[0]) * source.planes, tokens.start, heads[0] - holder.heads[0]
            from_slot = slot + tokens.start - there.start
            per_slot = Loop(len(tokens), of_source.slot_bytes, staged.slot_bytes, of_target.slot_bytes)
            per_head = Loop(len(heads), of_source.head_bytes, staged.head_bytes, of_target.head_bytes)
            per_plane = Loop(planes, of_source.plane_bytes, staged.plane_bytes, of_target.plane_bytes)
            inner = (per_head, per_slot) if target.order == "token_major" else (per_slot, per_head)
            cells, loops = folded((*inner, per_plane), 1, (source.head_bytes, target.head_bytes))
            at = of_source.at(plane, from_slot, head), staged.at(plane, from_slot, head), of_target.at(*first)
            found.append(BlockCopy(target_block, StridedCopy(*at, cells, loops)))
    return found


def _split_at_blocks(slots: range, target_slot: int, block_tokens: int) -> list[tuple[int, int, range]]:
    """Split slots at the ends of target blocks: (index of the block, first slot, slots in the target block).

    target_slot: counted from the start of the first target block. It may lie in a later one.
    """
    parts: list[tuple[int, int, range]] = []
    slot = slots.start
    while slot < slots.stop:
        block, first = divmod(target_slot + slot - slots.start, block_tokens)
        count = min(slots.stop - slot, block_tokens - first)
        parts.append((block, slot, range(first, first + count)))
        slot += count
    return parts


def _shared(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _as_runs(source: KVLayout, target: KVLayout, copies: list[BlockCopy]) -> list[BlockCopy]:
    """Join adjacent copies into runs. Empty if a copy is strided, converts values, or has several destinations."""
    held_once = len(_one_holder_each(target)) == len(target.shards)
    if source.dtype != target.dtype or not held_once or any(copy.loops for _, copy in copies):
        return []
    runs: list[BlockCopy] = []
    for target_block, copy in copies:
        if runs and runs[-1].target_block == target_block:
            last = runs[-1].copy
            size_bytes = last.cells * source.head_bytes
            if (last.source_bytes + size_bytes, last.target_bytes + size_bytes) == (
                copy.source_bytes,
                copy.target_bytes,
            ):
                joined = StridedCopy(
                    last.source_bytes, last.staged_bytes, last.target_bytes, last.cells + copy.cells, ()
                )
                runs[-1] = BlockCopy(target_block, joined)
                continue
        runs.append(BlockCopy(target_block, copy))
    return runs


def _reads_of(runs: list[BlockCopy], cell_bytes: int) -> tuple[Read, ...]:
    reads: list[Read] = []
    for _, run in runs:
        add_read(reads, run.source_bytes, run.cells * cell_bytes)
    return tuple(reads)
