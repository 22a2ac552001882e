"""Store of packed blocks: they are converted to a narrower KV type on the way to another store, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from baton.core.types import BlockHash
from baton.decide.kv.packing import Packing
from baton.move.recoding import Recoding
from baton.move.store.port import Store, StoreCounters


class PackedStore:
    """Pack each block for the inner store, whose blocks have `packing.block_bytes` bytes.

    The thread that calls `put` or `get` converts, in buffers of its own: one packed copy of the given blocks.
    """

    def __init__(self, inner: Store, packing: Packing) -> None:
        self._inner = inner
        self._packing = packing
        self._packed_bytes = packing.block_bytes
        layout = packing.layout
        self._there = Recoding(layout.dtype, packing.dtype, layout.head_dim)
        self._back = Recoding(packing.dtype, layout.dtype, layout.head_dim)
        self.name = f"{packing.dtype} {inner.name}"

    @property
    def capacity_blocks(self) -> int | None:
        """Capacity of the inner store, which may shrink."""
        return self._inner.capacity_blocks

    @property
    def counters(self) -> StoreCounters:
        return self._inner.counters

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        pairs = self._pairs(blocks)
        for (_, memory), (_, packed) in zip(blocks, pairs, strict=True):
            if packed is not memory:
                self._convert(memory.cast("B"), packed, self._there)
        return self._inner.put(pairs)

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        pairs = self._pairs(blocks)
        found = self._inner.get(pairs)
        for (_, memory), (_, packed), is_found in zip(blocks, pairs, found, strict=True):
            if is_found:
                self._convert(packed, memory.cast("B"), self._back)
        return found

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        self._inner.drop(hashes)

    def held(self) -> list[BlockHash]:
        return self._inner.held()

    def close(self) -> None:
        self._inner.close()

    def _pairs(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[tuple[BlockHash, memoryview]]:
        """Return a buffer for each packed block. Memory of a wrong size stays as it is: the inner store refuses it."""
        packed = np.empty((len(blocks), self._packed_bytes), np.uint8)
        return [
            (block_hash, memoryview(packed[row]) if memory.nbytes == self._packing.layout.block_bytes else memory)
            for row, (block_hash, memory) in enumerate(blocks)
        ]

    def _convert(self, source: memoryview, target: memoryview, recoding: Recoding) -> None:
        is_packing = recoding is self._there
        from_bytes = into_bytes = 0
        for run in self._packing.runs:
            exact_bytes, packed_bytes = run.cells * self._packing.layout.head_bytes, self._packing.run_bytes(run)
            read_bytes, written_bytes = (exact_bytes, packed_bytes) if is_packing else (packed_bytes, exact_bytes)
            if run.is_exact:
                target[into_bytes : into_bytes + exact_bytes] = source[from_bytes : from_bytes + exact_bytes]
            else:
                recoding.run((source, from_bytes), (target, into_bytes), run.cells)
            from_bytes, into_bytes = from_bytes + read_bytes, into_bytes + written_bytes
