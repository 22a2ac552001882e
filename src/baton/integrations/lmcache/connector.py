"""LMCache's remote storage in a store of Baton. LMCache loads this module in its own processes.

```yaml
remote_storage_plugins: ["baton"]
extra_config:
  remote_storage_plugin.baton.module_path: baton.integrations.lmcache.connector
  remote_storage_plugin.baton.class_name: BatonStoreConnector
  remote_storage_plugin.baton.store: pool://127.0.0.1:8700
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from baton.core.types import BlockHash
from baton.integrations.lmcache.listed_chunks import ListedChunks
from baton.move.store.store_url import open_store

log = logging.getLogger("baton.store")

_STORE = "remote_storage_plugin.baton.store"
_THREADS = 4
"""Concurrent calls of the store, which block."""
_UNREACHABLE = 1


class BatonStoreConnector(RemoteConnector):
    """Reads and writes LMCache's full chunks in a store of Baton, one block for each."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, local_cpu_backend: LocalCPUBackend, config: LMCacheEngineConfig | None
    ) -> None:
        """Open the store. Raises ValueError for unsupported settings, StoreError if the store cannot be opened."""
        super().__init__(local_cpu_backend.config, local_cpu_backend.metadata)
        url = _checked_url(local_cpu_backend.config)
        parts = [*map(str, (self.meta_shapes, self.meta_dtypes, self.meta_fmt))]
        fingerprint = blake2b("\n".join(["lmcache", *parts]).encode(), digest_size=16).hexdigest()
        self._local = local_cpu_backend
        self._store = open_store(url, layout_fingerprint=fingerprint, block_bytes=self.full_chunk_size_bytes)
        self._chunks = ListedChunks(self._store)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="baton-lmcache")

    async def exists(self, key: CacheEngineKey) -> bool:
        return self.exists_sync(key)

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self._chunks.has(_block_hash(key))

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Return how many of the first chunks are stored without a gap."""
        return next((index for index, key in enumerate(keys) if not self.exists_sync(key)), len(keys))

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        reading = self._threads.submit(self._read, keys)
        try:
            return await asyncio.shield(asyncio.wrap_future(reading))
        except asyncio.CancelledError:
            reading.add_done_callback(_release)  # the thread still writes into the memory
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        """Return the chunks before the first missing one."""
        read = await self.batched_get(keys)
        found = next((index for index, memory in enumerate(read) if memory is None), len(read))
        _release_all(read[found:])
        return [memory for memory in read[:found] if memory is not None]

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        for memory in memory_objs:
            memory.ref_count_up()  # LMCache releases its own count also if this is cancelled while the thread reads
        writing = self._threads.submit(self._write, keys, memory_objs)
        writing.add_done_callback(lambda _: _release_all(memory_objs))
        await asyncio.wrap_future(writing)

    def remove_sync(self, key: CacheEngineKey) -> bool:
        block_hash = _block_hash(key)
        was_there = self._chunks.has(block_hash)
        self._store.drop([block_hash])
        self._chunks.note_gone([block_hash])
        return was_there

    async def list(self) -> list[str]:
        """Return the hashes of the stored chunks: the store does not keep LMCache's keys."""
        held = await asyncio.wrap_future(self._threads.submit(self._store.held))
        return [block_hash.hex() for block_hash in held]

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        return 0 if self._store.counters.reachable else _UNREACHABLE

    async def close(self) -> None:
        self._chunks.close()
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(self._store.close)

    # ---- run by the threads

    def _read(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Allocate memory of LMCache for the chunks, and fill it. None: missing, damaged, or no memory is left."""
        found: list[MemoryObj | None] = []
        for _ in keys:
            memory = self._local.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if memory is None:
                break
            found.append(memory)
        hashes = [_block_hash(key) for key in keys[: len(found)]]
        views = [memory.byte_array for memory in found if memory is not None]
        are_whole = self._store.get([(name, memoryview(view)) for name, view in zip(hashes, views, strict=True)])
        self._chunks.note_gone([name for name, is_whole in zip(hashes, are_whole, strict=True) if not is_whole])
        _release_all([memory for memory, is_whole in zip(found, are_whole, strict=True) if not is_whole])
        read = [memory if is_whole else None for memory, is_whole in zip(found, are_whole, strict=True)]
        return read + [None] * (len(keys) - len(read))

    def _write(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Store the full chunks. LMCache releases their memory after this."""
        blocks = [
            (_block_hash(key), memoryview(memory.byte_array)) for key, memory in zip(keys, memory_objs, strict=True)
        ]
        kept = self._store.put(blocks)
        self._chunks.note_kept([name for (name, _), is_kept in zip(blocks, kept, strict=True) if is_kept])


def _block_hash(key: CacheEngineKey) -> BlockHash:
    return BlockHash(blake2b(key.to_string().encode(), digest_size=16).digest())


def _checked_url(config: LMCacheEngineConfig) -> str:
    """Return the store's URL. Raises ValueError with every setting of LMCache that does not fit."""
    url = (config.extra_config or {}).get(_STORE, "")
    problems = [
        problem
        for is_wrong, problem in (
            (not url, f'extra_config lacks "{_STORE}", such as pool://HOST:PORT'),
            (config.use_layerwise, "use_layerwise must be false: a block holds all layers of a chunk"),
            (config.save_unfull_chunk, "save_unfull_chunk must be false: all blocks of a store have one size"),
            (config.remote_serde != "naive", f"remote_serde is {config.remote_serde!r} and must be naive"),
        )
        if is_wrong
    ]
    if problems:
        raise ValueError("BatonStoreConnector: " + "; ".join(problems))
    return str(url)


def _release(reading: Future[list[MemoryObj | None]]) -> None:
    if reading.exception() is None:
        _release_all(reading.result())


def _release_all(memories: Sequence[MemoryObj | None]) -> None:
    for memory in memories:
        if memory is not None:
            memory.ref_count_down()
