"""Which bytes of two arenas a copy of KV is about, and the memory that converted KV passes through."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.core.copies import LayerSpan
from baton.core.errors import TransferError
from baton.core.types import BlockId
from baton.decide.kv.conversion import Conversion
from baton.decide.kv.copy_plan import CopyPlan
from baton.decide.kv.layout import KVLayout
from baton.move.transport.port import Extent
from baton.serve.messages.moving import Crossing

_BUFFER_BYTES_MIN = 1 << 20
_STAGING_BYTES_MAX = 1 << 30
"""Of a mover's buffers together. What finds none is computed again."""

ARENA = 0
"""The region that every mover registers first."""


def plan_of(crossing: Crossing) -> CopyPlan | None:
    """Plan a copy between two layouts. None: they are one, and whole blocks go as they are."""
    source, target = crossing.source, crossing.target
    if source == target:
        return None
    assert crossing.layers is None, "layers are cut out of blocks of one layout only"
    conversion = Conversion(source, target)
    first = crossing.first_token
    # The last block's further slots are the request's too, on both hosts, and a whole block is one run.
    end = conversion.spare_end(first + crossing.tokens)
    return conversion.plan(crossing.read, crossing.write, range(first, end), tables_from=first)


def whole(blocks: Sequence[BlockId], layout: KVLayout, layers: LayerSpan | None) -> list[Extent]:
    """List the bytes of blocks, or those of some of their layers: a block is contiguous over layers."""
    first, size = 0, layout.block_bytes
    if layers is not None:
        layer_bytes = layout.block_bytes // layout.layers
        first, size = layers.first * layer_bytes, (layers.end - layers.first) * layer_bytes
    return [Extent(block * layout.block_bytes + first, size, ARENA) for block in blocks]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that every transport of a mover knows by one number."""

    region: int
    memory: memoryview

    @property
    def size_bytes(self) -> int:
        return self.memory.nbytes


@dataclass(slots=True)
class Staging:
    """Buffers that are lent and come back. They are made as they are needed and stay: transports forget no memory."""

    register: Callable[[memoryview], int]
    _idle: list[Buffer] = field(default_factory=list[Buffer])
    _made_bytes: int = 0

    def take(self, size_bytes: int) -> Buffer:
        """Lend the smallest buffer that is large enough. Raises TransferError where there is no room for one."""
        fitting = [buffer for buffer in self._idle if buffer.size_bytes >= size_bytes]
        if fitting:
            buffer = min(fitting, key=lambda idle: idle.size_bytes)
            self._idle.remove(buffer)
            return buffer
        made_bytes = max(_BUFFER_BYTES_MIN, 1 << (size_bytes - 1).bit_length())
        if self._made_bytes + made_bytes > _STAGING_BYTES_MAX:
            raise TransferError(
                f"converting KV takes a buffer of {made_bytes} bytes, and of {_STAGING_BYTES_MAX} bytes"
                f" {self._made_bytes} are taken; give both hosts one KV layout, or let fewer requests go between them"
            )
        memory = memoryview(mmap.mmap(-1, made_bytes))
        self._made_bytes += made_bytes
        return Buffer(self.register(memory), memory)

    def give(self, buffer: Buffer) -> None:
        """Take one back."""
        self._idle.append(buffer)
