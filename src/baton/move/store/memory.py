"""Store in this process's memory, for tests. It is the oracle for the other stores."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from baton.core.types import BlockHash
from baton.move.store.port import StoreCounters


class MemoryStore:
    """Copies of blocks in a dict, oldest first."""

    name = "memory"

    def __init__(self, *, block_bytes: int, capacity_bytes: int) -> None:
        self.capacity_blocks: int | None = capacity_bytes // block_bytes
        self.counters = StoreCounters()
        self._block_bytes = block_bytes
        self._room = capacity_bytes // block_bytes
        self._blocks: dict[BlockHash, bytes] = {}
        self._lock = threading.Lock()

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        with self._lock:
            fitting = {
                block_hash: memory for block_hash, memory in blocks if memory.nbytes == self._block_bytes and self._room
            }
            for block_hash in fitting:
                if block_hash in self._blocks:
                    self._blocks[block_hash] = self._blocks.pop(block_hash)  # now the youngest
            for block_hash, memory in fitting.items():
                if block_hash not in self._blocks:
                    self._keep(block_hash, memory)
            kept = [block_hash in self._blocks for block_hash, _ in blocks]
            self.counters.refused += kept.count(False)
        return kept

    def _keep(self, block_hash: BlockHash, memory: memoryview) -> None:
        while len(self._blocks) >= self._room:
            del self._blocks[next(iter(self._blocks))]
            self.counters.dropped += 1
        self._blocks[block_hash] = bytes(memory)
        self.counters.put += 1

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        with self._lock:
            return [self._get(block_hash, memory) for block_hash, memory in blocks]

    def _get(self, block_hash: BlockHash, memory: memoryview) -> bool:
        found = self._blocks.get(block_hash)
        if found is None or memory.nbytes != len(found):
            self.counters.misses += 1
            return False
        memory.cast("B")[:] = found
        self.counters.hits += 1
        return True

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        with self._lock:
            for block_hash in hashes:
                if self._blocks.pop(block_hash, None) is not None:
                    self.counters.dropped += 1

    def held(self) -> list[BlockHash]:
        with self._lock:
            return list(self._blocks)

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._room = 0
