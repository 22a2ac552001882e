"""Where pulled KV goes: straight into the arena, or into buffers first, from which it is converted.

Numbers are converted where the CPU reaches them. So for an arena on a device, a copy between layouts is planned into a
shadow: as many blocks as the target's, one after the other, in host memory. What was written there then goes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from baton.core.types import BlockId
from baton.decide.kv.copy_plan import CopyPlan, StridedCopy
from baton.decide.kv.layout import DTYPE_BYTES, SCALE_BYTES
from baton.move.copies import fastest_copy
from baton.move.transport.convert import received, unstage
from baton.move.transport.copying import copy_portions
from baton.move.transport.extents import Rows, Spread, collated
from baton.move.transport.port import Extent, Memory
from baton.move.transport.staged import StagedMemory
from baton.serve.host.crossing import ARENA, Buffer, Staging, plan_of, whole
from baton.serve.messages.moving import Crossing


@dataclass(slots=True)
class Arrival:
    """One pull's way into an arena: `plan`, `borrow`, then `extents` are pulled into, `finish`, `give_back`."""

    crossing: Crossing
    arena: Memory
    _plan: CopyPlan | None = field(default=None, init=False)
    """What is left to do when the bytes are here. None: nothing."""
    _staged: Buffer | None = field(default=None, init=False)
    _shadow: Buffer | None = field(default=None, init=False)

    @property
    def is_direct(self) -> bool:
        """The bytes are where they belong once they are here."""
        return self._staged is None and self._shadow is None

    def plan(self) -> None:
        """Find out what has to be converted. Raises TransferError where that cannot be."""
        self._plan = plan_of(self.crossing if isinstance(self.arena, memoryview) else _shadowed(self.crossing))

    def borrow(self, staging: Staging) -> None:
        """Take what buffers it needs. Raises TransferError where there is no room for them."""
        if self._plan is None:
            return
        if self._plan.staging_bytes:
            self._staged = staging.take(self._plan.staging_bytes)
        if isinstance(self.arena, StagedMemory):
            self._shadow = staging.take(len(self.crossing.write) * self.crossing.target.block_bytes)

    def extents(self) -> Sequence[Extent]:
        """List what is pulled into."""
        if self._plan is None:
            return whole(self.crossing.write, self.crossing.target, self.crossing.layers)
        arena = ARENA if self._shadow is None else self._shadow.region
        return received(self._plan, arena, arena if self._staged is None else self._staged.region)

    def finish(self) -> None:
        """Convert, and bring to the arena what has been put together. Raises TransferError where a device fails."""
        if self._plan is None:
            return
        into = self.arena if self._shadow is None else self._shadow.memory
        if self._staged is not None:
            assert isinstance(into, memoryview), "a device's arena has a shadow"
            unstage(self._plan, self._staged.memory, into)
        if self._shadow is not None:
            assert isinstance(self.arena, StagedMemory), "memory of the host needs no shadow"
            _land(self._plan, self.crossing, self._shadow.memory, self.arena)

    def give_back(self, staging: Staging) -> None:
        """Return the buffers, whatever came of the pull."""
        for buffer in (self._staged, self._shadow):
            if buffer is not None:
                staging.give(buffer)
        self._staged = self._shadow = None


def _shadowed(crossing: Crossing) -> Crossing:
    """Return the same copy with blocks of the shadow for its target."""
    return msgspec.structs.replace(crossing, write=tuple(BlockId(place) for place in range(len(crossing.write))))


def _land(plan: CopyPlan, crossing: Crossing, shadow: memoryview, arena: StagedMemory) -> None:
    """Bring what the plan has written into the shadow to the blocks that it is for; other bytes stay."""
    block_bytes = crossing.target.block_bytes
    written = _written(plan, block_bytes)
    source = Spread(written, {0: shadow})
    into = written.copy()
    into[:, 0] += (np.array(crossing.write, np.int64) * block_bytes)[written[:, 0] // block_bytes]
    into[:, 0] -= written[:, 0] // block_bytes * block_bytes
    copy_portions(fastest_copy(), source, Spread(into, {0: arena}), range(source.size_bytes))


def _written(plan: CopyPlan, block_bytes: int) -> Rows:
    """List the runs that a plan writes, block by block: [runs, 3], the last column 0."""
    landed = [(landing.offset_bytes, landing.size_bytes) for landing in plan.landings if not landing.staged]
    runs = np.concatenate([np.array(landed, np.int64).reshape(-1, 2), *(_runs(plan, copy) for copy in plan.copies)])
    runs = runs[np.argsort(runs[:, 0])]
    rows = np.column_stack((runs, runs[:, 0] // block_bytes))
    rows = collated(rows)  # within each block
    rows[:, 2] = 0
    return rows


def _runs(plan: CopyPlan, copy: StridedCopy) -> np.ndarray:
    """Where the runs of one copy are written: [runs, 2], offset and size."""
    cell_bytes = plan.head_dim * DTYPE_BYTES[plan.target_dtype] + SCALE_BYTES.get(plan.target_dtype, 0)
    offsets = np.array([copy.target_bytes], np.int64)
    for loop in copy.loops:
        offsets = np.add.outer(offsets, np.arange(loop.count) * loop.target_bytes).ravel()
    return np.column_stack((offsets, np.full_like(offsets, copy.cells * cell_bytes)))
