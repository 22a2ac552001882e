"""Test BatonStoreConnector with stand-ins for LMCache's classes."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton.core.types import BlockHash
from baton.move.store.memory import MemoryStore

CHUNK_BYTES = 64


class RemoteConnector:
    """What LMCache's class does for its subclasses."""

    def __init__(self, _config: Any, _metadata: Any) -> None:
        self.meta_shapes = self.meta_dtypes = self.meta_fmt = ""
        self.full_chunk_size_bytes = CHUNK_BYTES


class Memory:
    """Memory of LMCache, which is reused once nothing counts it."""

    def __init__(self) -> None:
        self.byte_array = bytearray(b"k" * CHUNK_BYTES)
        self.counts = 1

    def ref_count_up(self) -> None:
        self.counts += 1

    def ref_count_down(self) -> None:
        self.counts -= 1
        if not self.counts:
            self.byte_array[:] = bytes(CHUNK_BYTES)


class SlowStore(MemoryStore):
    """Begins each put when it is told to."""

    def __init__(self) -> None:
        super().__init__(block_bytes=CHUNK_BYTES, capacity_bytes=1 << 20)
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        self.reached.set()
        assert self.goes_on.wait(60)
        return super().put(blocks)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, imported with these classes for LMCache's."""
    names = {
        "lmcache.utils": {"CacheEngineKey": object},
        "lmcache.v1.config": {"LMCacheEngineConfig": object},
        "lmcache.v1.memory_management": {"MemoryObj": object},
        "lmcache.v1.storage_backend.connector.base_connector": {"RemoteConnector": RemoteConnector},
        "lmcache.v1.storage_backend.local_cpu_backend": {"LocalCPUBackend": object},
    }
    for name, members in names.items():
        for end in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:end])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        vars(sys.modules[name]).update(members)
    monkeypatch.delitem(sys.modules, "baton.integrations.lmcache.connector", raising=False)
    yield importlib.import_module("baton.integrations.lmcache.connector")
    sys.modules.pop("baton.integrations.lmcache.connector", None)


def test_memory_of_a_cancelled_put_is_not_reused_while_it_is_read(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, memory, key = SlowStore(), Memory(), SimpleNamespace(to_string=lambda: "key")
    monkeypatch.setattr(connector, "open_store", lambda *_, **__: store)
    extra = {"remote_storage_plugin.baton.store": "memory://"}
    settings = SimpleNamespace(extra_config=extra, use_layerwise=False, save_unfull_chunk=False, remote_serde="naive")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        made = connector.BatonStoreConnector(loop, SimpleNamespace(config=settings, metadata=None), settings)
        putting = asyncio.ensure_future(made.put(key, memory))
        await asyncio.to_thread(store.reached.wait, 60)
        putting.cancel()
        await asyncio.wait([putting])
        memory.ref_count_down()  # as LMCache does then
        store.goes_on.set()
        await asyncio.to_thread(made._threads.shutdown)
        (stored,) = store.held()
        into = bytearray(CHUNK_BYTES)
        assert store.get([(stored, memoryview(into))]) == [True]
        assert into == b"k" * CHUNK_BYTES
        assert memory.counts == 0
        await made.close()

    asyncio.run(run())
