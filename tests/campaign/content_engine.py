"""The hash engine in a simulated worker: it computes text from the bytes of KV."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.compute.hash_engine import HashEngine
from baton.core.copies import LayerSpan
from baton.core.spill import SpillBlocks
from baton.core.step import Step, StepResult
from baton.core.types import BlockId
from baton.decide.kv.window import Window
from baton.lab.sim.engines import content_layout

_FRESH_BYTE = 0xEE
_GARBAGE_BYTE = 0xDD


class ContentEngine:
    """The real hash engine: any lost, swapped or stale block changes the text (INV-8). All workers share one arena."""

    def __init__(
        self, *, blocks: int, block_tokens: int, window: Window | None = None, layers: int = 1, slots: int = 0
    ) -> None:
        """slots: size of the spill space in blocks."""
        layout = content_layout(block_tokens, layers)
        self.layers = layers
        arena = bytearray([_FRESH_BYTE]) * (blocks * layout.block_bytes)
        shape = (blocks, layers, layout.planes, block_tokens, layout.kv_heads * layout.head_dim)
        self._blocks = np.frombuffer(arena, np.uint8).reshape(shape)
        seen = None if window is None else window.tokens
        self._engine = HashEngine(layout, memoryview(arena), window_tokens=seen)
        spill = bytearray([_FRESH_BYTE]) * (slots * layout.block_bytes)
        self._slots = np.frombuffer(spill, np.uint8).reshape(layers, slots, *shape[2:])
        self._engine.use_spill(memoryview(spill))

    @property
    def predictor(self) -> None:
        """None: the text depends on the KV bytes, so every step is computed."""
        return

    def execute(self, step: Step) -> StepResult:
        return self._engine.execute(step)

    def compute_layers(self, step: Step, end: int) -> None:
        self._engine.compute_layers(step, end)

    def corrupt_kv(self, step: Step) -> None:
        for part in step.slices:
            for position in range(part.start, part.start + part.count):
                self._token(part.block_table, position, None)[:] = _GARBAGE_BYTE

    def spill(self, order: SpillBlocks) -> None:
        self._slots[:, list(order.slots)] = self._blocks[list(order.blocks)].swapaxes(0, 1)

    def kv_of(self, table: Sequence[BlockId], slot: int, layers: LayerSpan | None = None) -> bytes:
        return self._token(table, slot, layers).tobytes()

    def write(self, table: Sequence[BlockId], slot: int, kv: bytes, layers: LayerSpan | None = None) -> None:
        token = self._token(table, slot, layers)
        token[:] = np.frombuffer(kv, np.uint8).reshape(token.shape)

    def _token(self, table: Sequence[BlockId], slot: int, layers: LayerSpan | None) -> npt.NDArray[np.uint8]:
        """Return a view of one token's KV: [layers, planes, width]."""
        block, rest = divmod(slot, self._blocks.shape[3])
        span = slice(None) if layers is None else slice(layers.first, layers.end)
        return self._blocks[table[block], span, :, rest]
