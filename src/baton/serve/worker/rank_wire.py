"""What a rank process is told when it starts, and what it answers."""

from __future__ import annotations

from msgspec import Struct

from baton.move.arena.cuda import CudaArena
from baton.move.arena.memfd import Arena
from baton.move.arena.opening import open_rank_arena_on
from baton.serve.messages.setup import WorkerSetup


class RankSetup(Struct, frozen=True, kw_only=True):
    """The first message to a rank, with the arena's descriptor beside it."""

    setup: WorkerSetup
    """Of the whole worker."""
    rank: int
    port: int
    """Where the ranks meet on loopback."""


class RankReady(Struct, frozen=True):
    """The only answer of a rank: it has loaded its part of the model."""

    rank: int


def open_rank_arena(setup: WorkerSetup, descriptor: int, rank: int) -> Arena | CudaArena:
    """Map what a rank of a worker computes on. Takes over the descriptor. Raises ArenaError: restart the server."""
    blocks = setup.arena_bytes // setup.layout.block_bytes
    return open_rank_arena_on(setup.device, descriptor, setup.layout, blocks, rank)


def rank_cores(setup: WorkerSetup, rank: int) -> tuple[int, tuple[int, ...]]:
    """Divide a worker's cores among its ranks: (threads, cores to pin to) of one of them.

    Ranks of a stage compute at the same time, so they share the cores. Stages take turns: each has all of them.
    """
    ranks = setup.layout.tensor_parallel
    threads, each, column = max(1, setup.threads // ranks), len(setup.cores) // ranks, rank % ranks
    return threads, setup.cores[column * each : (column + 1) * each] if each else setup.cores
