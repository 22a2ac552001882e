"""The port that every tier below the arena implements: bytes by block hash. A store is a cache: it may forget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.types import BlockHash


@dataclass(slots=True)
class StoreCounters:
    """What a store has done since it was opened. Its owner reads it and makes metrics of it."""

    put: int = 0
    """Blocks that were written."""
    refused: int = 0
    """Blocks that `put` did not keep: full, broken, another size."""
    hits: int = 0
    misses: int = 0
    """Every False of `get`, the damaged ones included."""
    damaged: int = 0
    """Blocks whose checksum, length or name was not what it should be. Each was forgotten."""
    dropped: int = 0
    """Blocks that were forgotten: by `drop`, or by the store itself to make room."""
    io_errors: int = 0
    """Calls that the disk, the connection or the other side has failed."""
    reachable: bool = True
    """False while the other side does not answer. Until it does, every call is refused at once."""


class Store(Protocol):
    """One tier's bytes. Called by the threads that move KV, never by a step; every method may block.

    Every block has the size that the store was opened for. What it says is a hint: a block that it lists may be gone or
    damaged when it is asked for, which is a miss. After `close` everything is a miss. All methods may be called from
    any thread.
    """

    name: str
    capacity_blocks: int | None
    """How many blocks it keeps before it forgets the oldest. None: the other side decides that. It may turn out to be
    fewer later: where a disk is full."""
    counters: StoreCounters

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Keep the bytes of these blocks. Returns for each whether it is kept: a full or broken store keeps none.

        A block that is already there stays as it is and counts as young again, which is True. A full store forgets the
        oldest blocks. Nothing of a block that was being written when the process died is ever returned by `get`.
        """
        ...

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Fill each memory with the bytes of its block. Returns for each whether it is now whole and verified.

        A False is a miss, whatever the reason: not there, another size, damaged, out of reach. Its memory's content
        is then undefined.
        """
        ...

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """Forget these blocks. Those that it does not have are no error.

        What was dropped may be listed again after a crash: with the same bytes, which its name stands for.
        """
        ...

    def held(self) -> list[BlockHash]:
        """List what an earlier run has left here, and what is kept now, oldest first.

        Raises StoreError where that cannot be found out.
        """
        ...

    def close(self) -> None:
        """Bring what was put to where it lasts, and let go of files, threads and connections."""
        ...
