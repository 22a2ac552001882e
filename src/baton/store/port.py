"""The port that every tier below the arena implements: bytes by block hash. A store is a cache: it may forget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.core.types import BlockHash


class Store(Protocol):
    """One tier's bytes. Called by the threads that move KV, never by a step; every method may block.

    What it says is a hint: a block that it lists may be gone or damaged when it is asked for, which is a miss.
    """

    name: str

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Keep the bytes of these blocks. Returns for each whether it is kept: a full or broken store keeps none.

        Nothing of a block that was being written when the process died is ever returned by `get`.
        """
        ...

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Fill each memory with the bytes of its block. Returns for each whether it is now whole and verified.

        A False is a miss, whatever the reason: not there, another size, damaged, out of reach. Its memory's content
        is then undefined.
        """
        ...

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        """Forget these blocks. Those that it does not have are no error."""
        ...

    def held(self) -> list[BlockHash]:
        """List what an earlier run has left here, oldest first. Raises StoreError where that cannot be found out."""
        ...

    def close(self) -> None:
        """Bring what was put to where it lasts, and let go of files, threads and connections."""
        ...
