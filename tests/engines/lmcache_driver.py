"""LMCache in a process of its own, in LMCache's environment: it carries out orders in JSON from stdin.

python lmcache_driver.py CONFIG_JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

CHUNK_TOKENS, LAYERS, HEADS, HEAD = 16, 3, 2, 64
DTYPE = torch.bfloat16


def content(number: int, shape: torch.Size) -> torch.Tensor:
    """Return the KV of a chunk, derived from its number."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(DTYPE)


class Driver:
    """LMCache's back ends as its engine makes them."""

    def __init__(self, settings: dict[str, Any]) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, max_local_cpu_size=0.01, local_cpu=False, **settings
        )
        self.metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=DTYPE,
            kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD),
            chunk_size=CHUNK_TOKENS,
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        backends = CreateStorageBackends(config, self.metadata, self.loop, dst_device="cpu")
        self.local = backends["LocalCPUBackend"]
        remote = backends.get("RemoteBackend-baton")
        assert isinstance(remote, RemoteBackend)
        self.remote = remote

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, number, DTYPE)

    def is_connected(self) -> bool:
        return self.remote.connection is not None

    def put(self, numbers: list[int], tokens: int = CHUNK_TOKENS) -> None:
        """Store chunks, and wait until LMCache has given their memory back."""
        memories = []
        for number in numbers:
            shape = torch.Size([2, LAYERS, tokens, HEADS * HEAD])
            memory = self.local.allocate(shape, DTYPE, MemoryFormat.KV_2LTD)
            memory.tensor.copy_(content(number, shape))
            memories.append(memory)
        self.remote.batched_submit_put_task([self.key(number) for number in numbers], memories)
        for memory in memories:
            memory.ref_count_down()
        self.wait_unused()

    def wait_unused(self) -> None:
        for _ in range(100_000):
            if self.used_bytes() == 0:
                return
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), self.loop).result()
        raise AssertionError(f"{self.used_bytes()} bytes of LMCache's memory are not released")

    def used_bytes(self) -> int:
        return int(self.local.memory_allocator.pin_allocator.total_allocated_size)

    def get(self, numbers: list[int]) -> list[bool]:
        """Return which chunks were found. Their bytes are compared."""
        found = self.remote.batched_get_blocking([self.key(number) for number in numbers])
        for number, memory in zip(numbers, found, strict=True):
            if memory is not None:
                assert torch.equal(memory.tensor, content(number, memory.tensor.shape)), f"chunk {number} differs"
                memory.ref_count_down()
        return [memory is not None for memory in found]

    def get_prefix(self, numbers: list[int]) -> int:
        """Return how many chunks LMCache's asynchronous read finds before the first gap."""
        reading = self.remote.batched_get_non_blocking("lookup", [self.key(number) for number in numbers])
        found = asyncio.run_coroutine_threadsafe(reading, self.loop).result()
        for memory in found:
            memory.ref_count_down()
        return len(found)

    def contains(self, numbers: list[int]) -> int:
        return self.remote.batched_contains([self.key(number) for number in numbers])

    def wait_for(self, numbers: list[int]) -> int:
        """Wait until a lookup finds all chunks, which other processes put."""
        for _ in range(10_000):
            if self.contains(numbers) == len(numbers):
                break
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self.loop).result()
        return self.contains(numbers)

    def remove(self, numbers: list[int]) -> list[bool]:
        return [self.remote.remove(self.key(number)) for number in numbers]

    def ping(self) -> int:
        return asyncio.run_coroutine_threadsafe(self.remote.connection.ping(), self.loop).result()

    def wait_ping(self, is_reachable: bool) -> None:
        """Wait until LMCache's health check finds the store reachable, or unreachable."""
        for _ in range(10_000):
            if (self.ping() == 0) == is_reachable:
                return
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self.loop).result()
        raise AssertionError(f"the store is still {'un' if is_reachable else ''}reachable")

    def cancel(self, numbers: list[int]) -> None:
        """Read chunks, and give the reads up at once."""
        for number in numbers:
            reading = asyncio.run_coroutine_threadsafe(self.remote.connection.get(self.key(number)), self.loop)
            reading.cancel()
        self.wait_unused()

    def close(self) -> None:
        self.remote.close()


def main() -> None:
    driver = Driver(json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    print(json.dumps(driver.is_connected()), file=answers, flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(driver, verb)(*arguments)), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
