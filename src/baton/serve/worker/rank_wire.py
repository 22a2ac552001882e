"""Messages between the first rank of a worker and another rank, and a rank's part of the arena and cores."""

from __future__ import annotations

from msgspec import Struct

from baton.move.arena.cuda import CudaArena
from baton.move.arena.memfd import Arena
from baton.move.arena.opening import open_rank_arena_on
from baton.serve.messages.setup import WorkerSetup


class RankSetup(Struct, frozen=True, kw_only=True):
    """First message to a rank. The arena's descriptor is attached."""

    setup: WorkerSetup
    """Setup of the whole worker."""
    rank: int
    port: int
    """Loopback port where the ranks connect to each other."""


class RankReady(Struct, frozen=True):
    """Answer of a rank once it has loaded its part of the model."""

    rank: int


def open_rank_arena(setup: WorkerSetup, descriptor: int, rank: int) -> Arena | CudaArena:
    """Map the rank's part of the arena. The result owns `descriptor`. Raises ArenaError if the size is wrong."""
    blocks = setup.arena_bytes // setup.layout.block_bytes
    return open_rank_arena_on(setup.device, descriptor, setup.layout, blocks, rank)


def rank_cores(setup: WorkerSetup, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return (threads, cores to pin to) of one rank.

    The ranks of a pipeline stage compute at the same time, so they divide the worker's cores. Stages take turns, so
    each stage uses all cores.
    """
    ranks = setup.layout.tensor_parallel * setup.layout.data_parallel
    threads, each, column = max(1, setup.threads // ranks), len(setup.cores) // ranks, rank % ranks
    return threads, setup.cores[column * each : (column + 1) * each] if each else setup.cores
