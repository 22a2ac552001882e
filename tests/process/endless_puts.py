"""A process that puts blocks until it is killed: `python -m tests.process.endless_puts FOLDER BLOCK_BYTES FIRST`."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.move.store.file import FileStore
from baton.move.store.segments import slot_bytes
from tests.stores import names, put

CAPACITY_BLOCKS = 64
PUT_BLOCKS = 7


def open_store(folder: Path, block_bytes: int) -> FileStore:
    capacity_bytes = CAPACITY_BLOCKS * slot_bytes(block_bytes)
    return FileStore(folder, layout_fingerprint="crash", block_bytes=block_bytes, capacity_bytes=capacity_bytes)


def main(folder: Path, block_bytes: int, first: int) -> None:
    """Put new blocks, drop one of them, and say after each call which ones are kept."""
    store, number = open_store(folder, block_bytes), first
    while True:
        some = names(PUT_BLOCKS, first=number)
        kept = put(store, some, block_bytes)
        store.drop([some[3]])
        print(" ".join(name.hex() for name, is_kept in zip(some, kept, strict=True) if is_kept and name != some[3]))
        sys.stdout.flush()
        number += PUT_BLOCKS


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
