"""A parallel worker whose ranks are threads of this process, over gloo. Tests the engine without rank processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed import HashStore

from baton.compute.models.card import ModelCard
from baton.compute.ranks.commands import RankCommand
from baton.compute.ranks.load_rank import CPU, RankArena, leader_engine, load_rank
from baton.compute.ranks.place import RankPlace, rank_place
from baton.compute.ranks.process_groups import connect_ranks
from baton.compute.ranks.runner import FollowerRank
from baton.compute.step_engine import StepEngine
from baton.decide.kv.layout import KVLayout


@dataclass
class _Queues:
    """Implements `RankCommandChannel`."""

    all: list[queue.SimpleQueue[RankCommand | None]] = field(default_factory=list)

    def send(self, command: RankCommand) -> None:
        for each in self.all:
            each.put(command)


@contextmanager
def parallel_engine(
    card: ModelCard,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    blocks: int = 64,
    block_tokens: int = 4,
    experts: bool = False,
    overlap: int = 0,
    context: int = 1,
    data: int = 1,
) -> Iterator[tuple[StepEngine, bytearray, KVLayout]]:
    """Run a float32 engine over a new arena while a with block runs."""
    layout = card.layout(
        block_tokens=block_tokens,
        dtype="float32",
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        context_parallel=context,
        data_parallel=data,
    )
    arena = bytearray(layout.block_bytes * blocks)
    with engine_over(
        card, layout, lambda place: RankArena.of(memoryview(arena), layout, place), experts=experts, overlap=overlap
    ) as engine:
        yield engine, arena, layout


@contextmanager
def engine_over(
    card: ModelCard,
    layout: KVLayout,
    arena_of: Callable[[RankPlace], RankArena],
    *,
    experts: bool = False,
    overlap: int = 0,
) -> Iterator[StepEngine]:
    """Run a float32 engine over these arenas while a with block runs."""
    store = HashStore()
    channel = _Queues([queue.SimpleQueue() for _ in range(layout.ranks - 1)])

    def follow(rank: int) -> None:
        place = rank_place(layout, rank, experts=experts)
        ranks = connect_ranks(place, store, CPU)
        follower = FollowerRank(load_rank(card, layout, arena_of(place), ranks, dtype="float32", threads=1))
        while (command := channel.all[rank - 1].get()) is not None:
            follower.execute(command)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, layout.ranks)]
    for thread in threads:
        thread.start()
    try:
        place = rank_place(layout, 0, experts=experts)
        ranks = connect_ranks(place, store, CPU)
        parts = load_rank(card, layout, arena_of(place), ranks, dtype="float32", threads=1)
        yield leader_engine(parts, layout, channel, overlap)
    finally:
        for each in channel.all:
            each.put(None)
        for thread in threads:
            thread.join()
