"""What a rank process is told when it starts, and what it answers."""

from __future__ import annotations

from msgspec import Struct

from baton.link.setup import WorkerSetup


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


def rank_cores(setup: WorkerSetup, rank: int) -> tuple[int, tuple[int, ...]]:
    """Divide a worker's cores among its ranks: (threads, cores to pin to) of one of them.

    Ranks of a stage compute at the same time, so they share the cores. Stages take turns: each has all of them.
    """
    ranks = setup.layout.tensor_parallel
    threads, each, column = max(1, setup.threads // ranks), len(setup.cores) // ranks, rank % ranks
    return threads, setup.cores[column * each : (column + 1) * each] if each else setup.cores
