"""A parallel worker whose ranks are threads of this process, over gloo: the engine's half, without processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed import HashStore

from baton.compute.models.card import ModelCard
from baton.compute.port import StepEngine
from baton.compute.ranks.load import CPU, RankArena, load_lead, load_rank
from baton.compute.ranks.meeting import meet
from baton.compute.ranks.orders import Order
from baton.compute.ranks.place import rank_place
from baton.compute.ranks.runner import Follower
from baton.decide.kv.layout import KVLayout


@dataclass
class _Queues:
    """Implements `Orders`."""

    all: list[queue.SimpleQueue[Order | None]] = field(default_factory=list)

    def put(self, order: Order) -> None:
        for each in self.all:
            each.put(order)


@contextmanager
def parallel_engine(
    card: ModelCard, *, tensor: int = 1, pipeline: int = 1, blocks: int = 64, block_tokens: int = 4
) -> Iterator[tuple[StepEngine, bytearray, KVLayout]]:
    """Run an engine in float32 over an arena of its own for the length of a with block."""
    layout = card.layout(block_tokens=block_tokens, dtype="float32", tensor_parallel=tensor, pipeline_parallel=pipeline)
    arena = bytearray(layout.block_bytes * blocks)
    with engine_over(card, layout, lambda rank: RankArena.of(memoryview(arena), layout, rank)) as engine:
        yield engine, arena, layout


@contextmanager
def engine_over(card: ModelCard, layout: KVLayout, arena_of: Callable[[int], RankArena]) -> Iterator[StepEngine]:
    """Run an engine in float32 over these arenas for the length of a with block."""
    store = HashStore()
    orders = _Queues([queue.SimpleQueue() for _ in range(layout.ranks - 1)])

    def follow(rank: int) -> None:
        ranks = meet(rank_place(layout, rank), store, CPU)
        follower = Follower(load_rank(card, layout, arena_of(rank), ranks, dtype="float32", threads=1))
        while (order := orders.all[rank - 1].get()) is not None:
            follower.obey(order)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, layout.ranks)]
    for thread in threads:
        thread.start()
    try:
        ranks = meet(rank_place(layout, 0), store, CPU)
        parts = load_rank(card, layout, arena_of(0), ranks, dtype="float32", threads=1)
        yield load_lead(parts, layout, orders)
    finally:
        for each in orders.all:
            each.put(None)
        for thread in threads:
            thread.join()
