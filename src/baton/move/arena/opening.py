"""Maps a host's arena in a process that was told of it, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence

from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, Place, open_cuda_arena
from baton.move.arena.cuda_driver import LIBRARY, CudaDriver
from baton.move.arena.memfd import Arena, open_arena


def device_of_rank(device: str, rank: int) -> str:
    """Name the device of a rank, where the first one has `device`: the CPU is everybody's, GPUs follow each other."""
    return device if device == "cpu" else f"cuda:{int(device.removeprefix('cuda:')) + rank}"


def places_of(drivers: Sequence[CudaDriver], layout: KVLayout, blocks: int) -> list[Place]:
    """Say how much of an arena of so many blocks lies on each device: one per rank."""
    return [(driver, blocks * shard.size_bytes) for driver, shard in zip(drivers, layout.shards, strict=True)]


def open_arena_on(device: str, descriptor: int, layout: KVLayout, blocks: int) -> Arena | CudaArena:
    """Map all of an arena whose descriptor was received, on `cpu` or from `cuda:N` on. Takes over the descriptor.

    Raises ArenaError where it is not what was announced, or a GPU is not there.
    """
    if device == "cpu":
        return open_arena(descriptor, blocks * layout.block_bytes)
    drivers = [_driver(device, rank) for rank in range(layout.ranks)]
    return open_cuda_arena(places_of(drivers, layout, blocks), descriptor)


def open_rank_arena_on(device: str, descriptor: int, layout: KVLayout, blocks: int, rank: int) -> Arena | CudaArena:
    """Map what a rank computes on: on CPUs the arena, which ranks share; on GPUs its own. See `open_arena_on`."""
    if device == "cpu":
        return open_arena_on(device, descriptor, layout, blocks)
    place = _driver(device, rank), blocks * layout.shards[rank].size_bytes
    return open_cuda_arena([place], descriptor, first_rank=rank)


def _driver(device: str, rank: int) -> CudaDriver:
    return CudaDriver(int(device_of_rank(device, rank).removeprefix("cuda:")), LIBRARY)
