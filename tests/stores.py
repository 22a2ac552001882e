"""Blocks whose bytes are derived from their names, for tests of stores."""

from __future__ import annotations

import functools
import hashlib
import mmap
from collections.abc import Sequence

import numpy as np

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.decide.kv.layout import KVLayout
from baton.decide.kv.packing import Packing
from baton.move.store.packed import PackedStore
from baton.move.store.port import Store
from baton.move.store.store_url import open_store

PACKING = Packing(KVLayout(layers=4, kv_heads=1, head_dim=64, block_tokens=4, dtype="bfloat16"), "mxfp4", 4)
"""Every layer is exact, so that a packed store gives any bytes back."""
BLOCK_BYTES = 100_000
"""Default size of a block on a pool node."""


def packed(store: Store) -> PackedStore:
    return PackedStore(store, PACKING)


def open_pool(url: str, *, fingerprint: str = "a layout", block_bytes: int = BLOCK_BYTES) -> Store:
    return open_store(url, layout_fingerprint=fingerprint, block_bytes=block_bytes)


def names(count: int, *, first: int = 0) -> list[BlockHash]:
    """Distinct block hashes, the same ones in every run."""
    return [
        BlockHash(hashlib.blake2b(str(first + number).encode(), digest_size=16).digest()) for number in range(count)
    ]


@functools.lru_cache(maxsize=48)
def content(name: BlockHash, size_bytes: int) -> bytes:
    """Return the bytes of the block with this name."""
    return np.random.default_rng(int.from_bytes(name)).bytes(size_bytes)


def block(name: BlockHash, size_bytes: int) -> tuple[BlockHash, memoryview]:
    return name, memoryview(content(name, size_bytes))


def room(name: BlockHash, size_bytes: int, *, aligned: bool = False) -> tuple[BlockHash, memoryview]:
    """Return memory for a block, aligned as in an arena or not."""
    if aligned:
        return name, memoryview(mmap.mmap(-1, size_bytes))
    return name, memoryview(bytearray(size_bytes + 1))[1:]


def put(store: Store, wanted: Sequence[BlockHash], size_bytes: int) -> list[bool]:
    return store.put([block(name, size_bytes) for name in wanted])


def get(store: Store, wanted: Sequence[BlockHash], size_bytes: int, *, aligned: bool = False) -> list[bool]:
    """Get blocks, and check the bytes of those that are found."""
    rooms = [room(name, size_bytes, aligned=aligned) for name in wanted]
    found = store.get(rooms)
    for (name, memory), is_there in zip(rooms, found, strict=True):
        assert not is_there or bytes(memory) == content(name, size_bytes), f"{name.hex()} has other bytes"
    return found


def ask_until_reachable(store: Store) -> None:
    """Bounded by the number of attempts, each of which calls the server."""
    for _ in range(100_000):
        if store.counters.reachable:
            return
        try:
            store.held()
        except StoreError:
            continue
    raise AssertionError("the store did not come back")
