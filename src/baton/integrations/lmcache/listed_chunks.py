"""Which chunks a store has: those that this process put, and those that others put, by the store's list."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.port import Store

LIST_S = 1.0
"""Pause between two listings of the store."""


class ListedChunks:
    """Answers from memory, because LMCache asks for chunks in its scheduler's way. Any thread may call it.

    The answer is up to LIST_S old: a listed chunk may be evicted, which is a miss of the following read.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: set[BlockHash] = set()
        self._kept: set[BlockHash] = set()
        """Chunks that were put since the current listing began."""
        self._closed = threading.Event()
        self._listing = threading.Thread(target=self._run, name="baton-lmcache-list", daemon=True)
        self._listing.start()

    def has(self, block_hash: BlockHash) -> bool:
        with self._lock:
            return block_hash in self._held or block_hash in self._kept

    def note_kept(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            self._kept.update(hashes)

    def note_gone(self, hashes: Sequence[BlockHash]) -> None:
        with self._lock:
            self._held.difference_update(hashes)
            self._kept.difference_update(hashes)

    def close(self) -> None:
        self._closed.set()
        self._listing.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                before, self._kept = self._kept, set()
                self._held |= before
            self._list()
            self._closed.wait(LIST_S)

    def _list(self) -> None:
        """List the store. While it cannot be listed, only the latest puts of this process count."""
        try:
            held = set(self._store.held())
        except StoreError:
            held = set()
        with self._lock:
            self._held = held
