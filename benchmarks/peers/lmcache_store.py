"""Put and get of LMCache on the CPU: in the process's own memory, or with its server over TCP.

python lmcache_store.py local|server BLOCK_BYTES BLOCKS REPEATS      in an environment that has the package; prints JSON

`local` is LMCache's CPU backend: no other process sees it. A put copies into its pinned memory and names it, a get
copies out. `server` adds its lm:// connector; puts are not acknowledged, so each timing ends with a question.
LMCACHE_TRACK_USAGE=false in the environment keeps it from reporting to its makers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

HEAD = 512
TRIES = 400
NUMBER = torch.bfloat16
Got = TypeVar("Got")


class Local:
    """The CPU backend."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        self.shape = torch.Size([2, 1, block_bytes // (2 * HEAD * 2), HEAD])
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=block_bytes * (blocks + 8) / 2**30 + 0.5, chunk_size=256
        )
        kv_shape = (1, 2, 256, 1, HEAD)
        metadata = LMCacheMetadata("benchmark", 1, 1, 0, 0, NUMBER, kv_shape)
        self.backend = LocalCPUBackend(config, metadata, dst_device="cpu")

    def staged(self, source: torch.Tensor) -> MemoryObj:
        """Copy a block into LMCache's memory, as it does from a GPU."""
        held = self.backend.allocate(self.shape, NUMBER, MemoryFormat.KV_2LTD)
        held.tensor.view(-1).copy_(source)
        return held

    def put(self, key: CacheEngineKey, source: torch.Tensor) -> None:
        held = self.staged(source)
        self.backend.submit_put_task(key, held)
        held.ref_count_down()

    def get(self, key: CacheEngineKey, target: torch.Tensor) -> None:
        held = self.backend.get_blocking(key)
        target.copy_(held.tensor.view(-1))
        held.ref_count_down()

    def settle(self, key: CacheEngineKey) -> None:
        assert self.backend.contains(key)

    def clear(self) -> None:
        self.backend.clear()


class Server(Local):
    """Its server, and the connector that LMCache uses for it."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        super().__init__(block_bytes, 4)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.connector = self._connected(port)

    def _connected(self, port: int) -> LMCServerConnector:
        for _ in range(TRIES):
            try:
                return LMCServerConnector("127.0.0.1", port, self.loop, self.backend)
            except OSError:
                subprocess.run([sys.executable, "-c", ""], check=True)
        raise TimeoutError("the server did not come up")

    def _wait(self, work: Coroutine[Any, Any, Got]) -> Got:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def put(self, key: CacheEngineKey, source: torch.Tensor) -> None:
        held = self.staged(source)
        self._wait(self.connector.put(key, held))
        held.ref_count_down()

    def get(self, key: CacheEngineKey, target: torch.Tensor) -> None:
        held = self._wait(self.connector.get(key))
        target.copy_(held.tensor.view(-1))
        held.ref_count_down()

    def settle(self, key: CacheEngineKey) -> None:
        assert self.connector.exists_sync(key)

    def clear(self) -> None:
        """It keeps what it has: blocks are put again under the same names."""


def measure(store: Local, block_bytes: int, blocks: int, repeats: int) -> dict[str, dict[str, float]]:
    numbers = block_bytes // 2
    memory = torch.randint(-(2**15), 2**15 - 1, (blocks * numbers,), dtype=torch.int16).view(NUMBER)
    parts = [memory[index * numbers : (index + 1) * numbers] for index in range(blocks)]
    keys = [CacheEngineKey("benchmark", 1, 0, index, NUMBER) for index in range(blocks)]
    before = parts[-1].view(torch.int16).clone()
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[CacheEngineKey, torch.Tensor], None]) -> None:
        began_s = time.perf_counter()
        for key, part in zip(keys, parts, strict=True):
            call(key, part)
        store.settle(keys[-1])
        found.setdefault(name, []).append(blocks * block_bytes / (time.perf_counter() - began_s) / 1e9)

    for _ in range(repeats + 1):  # the first one faults memory in, and is left out
        store.clear()
        timed("put_one", store.put)
        timed("get_one", store.get)
    assert torch.equal(parts[-1].view(torch.int16), before)
    return {name: {"gb_per_s": round(statistics.median(values[1:]), 4)} for name, values in found.items()}


def main() -> None:
    kind, (block_bytes, blocks, repeats) = sys.argv[1], map(int, sys.argv[2:5])
    store = (Local if kind == "local" else Server)(block_bytes, blocks)
    try:
        figures = measure(store, block_bytes, blocks, repeats)
    finally:
        if isinstance(store, Server):
            store.process.kill()
    print("\n" + json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
