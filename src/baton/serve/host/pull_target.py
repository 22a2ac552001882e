"""The destination of pulled KV: the arena itself, or buffers from which the KV is converted into the arena.

KV is converted on the CPU. If the arena is on a device and the layouts differ, the KV is converted into a *shadow*:
host memory with one block for each target block. The shadow is then copied to the device.
"""

from __future__ import annotations

import mmap
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.core.copies import LayerSpan
from baton.core.errors import TransferError
from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.copy_plan import CopyPlan, StridedCopy
from baton.decide.kv.layout import KVLayout, cell_bytes
from baton.move.copies import fastest_copy
from baton.move.transport.convert import target_extents, unstage
from baton.move.transport.copier import copy_portions
from baton.move.transport.extents import Rows, Spread, collated
from baton.move.transport.port import Extent, Memory
from baton.move.transport.staged import StagedMemory
from baton.serve.messages.moving import CopySpec

ARENA = 0
"""Region number of the arena: every mover registers it first."""
_BUFFER_BYTES_MIN = 1 << 20
_STAGING_BYTES_MAX = 1 << 30
"""Bound of all conversion buffers of a mover. A copy that would exceed it fails, and its KV is computed again."""


def plan_of(spec: CopySpec) -> CopyPlan | None:
    """Plan a copy between two layouts. Return None if the layouts are equal: no conversion is needed."""
    source, target = spec.source, spec.target
    if source == target:
        return None
    assert spec.layers is None, "layers are cut out of blocks of one layout only"
    conversion = Conversion(source, target)
    first = spec.first_token
    # Copy the unused slots of the last block too: the request owns them on both hosts, and a whole block is one run.
    end = conversion.spare_end(first + spec.tokens)
    return conversion.plan(spec.read, spec.write, range(first, end), tables_from=first)


def block_extents(blocks: Sequence[BlockId], layout: KVLayout, layers: LayerSpan | None) -> list[Extent]:
    """Return the arena's extents of blocks, or of some of their layers. The layers of a block are contiguous."""
    first, size = 0, layout.block_bytes
    if layers is not None:
        layer_bytes = layout.block_bytes // layout.layers
        first, size = layers.first * layer_bytes, (layers.end - layers.first) * layer_bytes
    return [Extent(block * layout.block_bytes + first, size, ARENA) for block in blocks]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Host memory that is registered with every transport of a mover under one region number."""

    region: int
    memory: memoryview

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes


@dataclass(slots=True)
class Staging:
    """Buffers for conversion. They are created on demand and reused: transports cannot unregister memory."""

    register: Callable[[memoryview], int]
    _idle: list[Buffer] = field(default_factory=list[Buffer])
    """By size, the smallest first."""
    _made_bytes: int = 0

    def take(self, size_bytes: int) -> Buffer:
        """Return the smallest idle buffer of sufficient size. If it is over twice as large as needed, prefer a new one.

        Drops idle buffers that are too small if all buffers together would exceed 1 GiB. Raises TransferError if those
        in use leave too little.
        """
        made_bytes = max(_BUFFER_BYTES_MIN, 1 << (size_bytes - 1).bit_length())
        made_bytes = min(made_bytes, max(size_bytes, _STAGING_BYTES_MAX // 2))
        fitting = next((idle for idle in self._idle if idle.size_bytes >= size_bytes), None)
        is_full = self._made_bytes + made_bytes > _STAGING_BYTES_MAX
        if fitting is not None and (is_full or fitting.size_bytes <= 2 * made_bytes):
            self._idle.remove(fitting)
            return fitting
        used_bytes = self._made_bytes - sum(idle.size_bytes for idle in self._idle)
        if used_bytes + made_bytes > _STAGING_BYTES_MAX:
            raise TransferError(
                f"converting KV takes a buffer of {made_bytes} bytes, but {used_bytes} of the"
                f" {_STAGING_BYTES_MAX} bytes for such buffers are in use; give both hosts one KV layout,"
                " or hand off fewer requests at once"
            )
        while self._made_bytes + made_bytes > _STAGING_BYTES_MAX:
            self._drop(self._idle.pop(0))
        memory = memoryview(mmap.mmap(-1, made_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._made_bytes += made_bytes
        return Buffer(self.register(memory), memory)

    def _drop(self, buffer: Buffer) -> None:
        """Return the pages of a buffer to the system. It stays registered, so its addresses remain in use.

        NIXL keeps the pages as well if the network card needs them pinned.
        """
        assert isinstance(buffer.memory.obj, mmap.mmap)
        buffer.memory.obj.madvise(mmap.MADV_DONTNEED)
        self._made_bytes -= buffer.size_bytes

    def give(self, buffer: Buffer) -> None:
        insort(self._idle, buffer, key=lambda idle: idle.size_bytes)


@dataclass(slots=True)
class PullTarget:
    """The destination of one pull. Call `plan`, `borrow`, pull into `extents()`, then `finish` and `give_back`."""

    spec: CopySpec
    arena: Memory
    _plan: CopyPlan | None = field(default=None, init=False)
    """Conversion to do once the bytes have arrived. None: the layouts are the same."""
    _staged: Buffer | None = field(default=None, init=False)
    _shadow: Buffer | None = field(default=None, init=False)

    @property
    def is_direct(self) -> bool:
        """Return whether the transport writes into the arena itself, so that `finish` has nothing to do."""
        return self._staged is None and self._shadow is None

    def plan(self) -> None:
        """Plan the conversion, if any. Raises TransferError if the layouts cannot be converted."""
        self._plan = plan_of(self.spec if isinstance(self.arena, memoryview) else _into_shadow(self.spec))

    def borrow(self, staging: Staging) -> None:
        """Take the buffers that the plan needs. Raises TransferError if the staging memory is exhausted."""
        if self._plan is None:
            return
        if self._plan.staging_bytes:
            self._staged = staging.take(self._plan.staging_bytes)
        if isinstance(self.arena, StagedMemory):
            self._shadow = staging.take(len(self.spec.write) * self.spec.target.block_bytes)

    def extents(self) -> Sequence[Extent]:
        """Return the extents that the transport fills."""
        if self._plan is None:
            return block_extents(self.spec.write, self.spec.target, self.spec.layers)
        arena = ARENA if self._shadow is None else self._shadow.region
        return target_extents(self._plan, arena, arena if self._staged is None else self._staged.region)

    def finish(self) -> None:
        """Convert staged bytes, and copy a shadow to the device. Raises TransferError if the device fails."""
        if self._plan is None:
            return
        into = self.arena if self._shadow is None else self._shadow.memory
        if self._staged is not None:
            assert isinstance(into, memoryview), "a device's arena has a shadow"
            unstage(self._plan, self._staged.memory, into)
        if self._shadow is not None:
            assert isinstance(self.arena, StagedMemory), "memory of the host needs no shadow"
            _copy_shadow(self._plan, self.spec, self._shadow.memory, self.arena)

    def give_back(self, staging: Staging) -> None:
        """Return the buffers, whether the pull succeeded or not."""
        for buffer in (self._staged, self._shadow):
            if buffer is not None:
                staging.give(buffer)
        self._staged = self._shadow = None


def _into_shadow(spec: CopySpec) -> CopySpec:
    """Return the copy with blocks 0, 1, ... of the shadow as its target, instead of the arena's blocks."""
    return msgspec.structs.replace(spec, write=tuple(BlockId(place) for place in range(len(spec.write))))


def _copy_shadow(plan: CopyPlan, spec: CopySpec, shadow: memoryview, arena: StagedMemory) -> None:
    """Copy the bytes that the plan wrote to the shadow to their blocks on the device. Other bytes do not change."""
    block_bytes = spec.target.block_bytes
    written = _written(plan, block_bytes)
    source = Spread(written, {0: shadow})
    into = written.copy()
    into[:, 0] += (np.array(spec.write, np.int64) * block_bytes)[written[:, 0] // block_bytes]
    into[:, 0] -= written[:, 0] // block_bytes * block_bytes
    copy_portions(fastest_copy(), source, Spread(into, {0: arena}), range(source.size_bytes))


def _written(plan: CopyPlan, block_bytes: int) -> Rows:
    """Return the byte runs that a plan writes, merged within each block: [runs, 3] of offset, size and region 0."""
    landed = [(landing.offset_bytes, landing.size_bytes) for landing in plan.landings if not landing.staged]
    runs = np.concatenate([np.array(landed, np.int64).reshape(-1, 2), *(_runs(plan, copy) for copy in plan.copies)])
    runs = runs[np.argsort(runs[:, 0])]
    rows = collated(np.column_stack((runs, runs[:, 0] // block_bytes)))  # by block, so that no run crosses two
    rows[:, 2] = 0
    return rows


def _runs(plan: CopyPlan, copy: StridedCopy) -> np.ndarray:
    """Return the byte runs that one strided copy writes: [runs, 2] of offset and size."""
    size_bytes = copy.cells * cell_bytes(plan.target_dtype, plan.head_dim)
    offsets = np.array([copy.target_bytes], np.int64)
    for loop in copy.loops:
        offsets = np.add.outer(offsets, np.arange(loop.count) * loop.target_bytes).ravel()
    return np.column_stack((offsets, np.full_like(offsets, size_bytes)))
