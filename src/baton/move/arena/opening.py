"""Map a host's arena by its descriptor, in host or device memory."""

from __future__ import annotations

from collections.abc import Sequence

from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, Place, open_cuda_arena
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver
from baton.move.arena.memfd import Arena, open_arena


def device_of_rank(device: str, rank: int) -> str:
    """Return the device of a rank; rank 0 has `device`. Ranks share the CPU, or use consecutive GPUs."""
    return device if device == "cpu" else f"cuda:{int(device.removeprefix('cuda:')) + rank}"


def places_of(drivers: Sequence[CudaDriver], layout: KVLayout, blocks: int) -> list[Place]:
    """Return the bytes of an arena of `blocks` blocks on each device, one per rank."""
    return [(driver, blocks * shard.size_bytes) for driver, shard in zip(drivers, layout.shards, strict=True)]


def open_arena_on(device: str, descriptor: int, layout: KVLayout, blocks: int) -> Arena | CudaArena:
    """Map all of an arena by its received descriptor, on `cpu` or from `cuda:N` on. Takes over the descriptor.

    Raises ArenaError if its size differs, or if a GPU is not available.
    """
    if device == "cpu":
        return open_arena(descriptor, blocks * layout.block_bytes)
    drivers = [_driver(device, rank) for rank in range(layout.ranks)]
    return open_cuda_arena(places_of(drivers, layout, blocks), descriptor)


def open_rank_arena_on(device: str, descriptor: int, layout: KVLayout, blocks: int, rank: int) -> Arena | CudaArena:
    """Map a rank's part of an arena: the whole arena on the CPU, the rank's own allocation on a GPU."""
    if device == "cpu":
        return open_arena_on(device, descriptor, layout, blocks)
    place = _driver(device, rank), blocks * layout.shards[rank].size_bytes
    return open_cuda_arena([place], descriptor, first_rank=rank)


def _driver(device: str, rank: int) -> CudaDriver:
    return CudaDriver(int(device_of_rank(device, rank).removeprefix("cuda:")), LIBRARY)
