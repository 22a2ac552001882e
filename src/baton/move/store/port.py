"""The interface of stores, which keep KV blocks by hash. A store is a cache: it may evict blocks at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.types import BlockHash


@dataclass(slots=True)
class StoreCounters:
    """Counters of a store since it was opened. Its owner reads them for metrics."""

    put: int = 0
    """Blocks that were written."""
    refused: int = 0
    """Blocks that `put` did not keep: the store was full or failed, or the size was wrong."""
    hits: int = 0
    misses: int = 0
    """Every False of `get`, including damaged blocks."""
    damaged: int = 0
    """Blocks with a wrong checksum, length or hash. Each was removed."""
    dropped: int = 0
    """Blocks that were removed by `drop`, or evicted by the store itself."""
    io_errors: int = 0
    """Calls that failed on the disk, the connection or the server."""
    reachable: bool = True
    """False while the server does not answer. Until it does, every call fails at once."""


class Store(Protocol):
    """The blocks of one tier. Any thread may call every method, and every method may block.

    Every block has the size that the store was opened for. A listed block may be evicted or damaged by the time of a
    `get`, which is a miss. After `close` everything is a miss.
    """

    name: str
    capacity_blocks: int | None
    """Blocks that fit before the oldest one is evicted. None: the server decides. It shrinks if the disk is full."""
    counters: StoreCounters

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Store blocks. Return for each whether it is kept.

        A block that is already stored becomes the youngest, and counts as kept. A full store evicts its oldest blocks.
        `get` never returns bytes of a block whose write was interrupted by a crash.
        """
        ...

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Fill each memory with the bytes of its block. Return for each whether it is complete and verified.

        False is a miss: the block is missing, damaged or of another size, or the store is unreachable. The content of
        its memory is undefined then.
        """
        ...

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """Remove blocks. Unknown blocks are ignored.

        After a crash, a removed block may be listed again, with the same bytes.
        """
        ...

    def held(self) -> list[BlockHash]:
        """List all blocks, including those of earlier runs, oldest first. Raises StoreError if that fails."""
        ...

    def close(self) -> None:
        """Make stored blocks durable, and release files, threads and connections."""
        ...
