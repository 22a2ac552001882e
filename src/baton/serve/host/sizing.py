"""Choose the size of one host: blocks of its arena, its workers, and the cores of each worker."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from baton.compute.models.card import ModelCard
from baton.core.config import Config, Topology
from baton.core.errors import ConfigError
from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout
from baton.move.cores import own_cores, usable_cores
from baton.move.memory_limits import memory_free_bytes, memory_total_bytes

_ARENA_BYTES_DEFAULT = 2 * 2**30
_CONTEXTS_MAX = 64
_FILES_MAX = 65536
_WORKER_BYTES = 256 * 2**20
"""Memory of a worker process beside its weights: interpreter, libraries, activations of a step."""


def worker_views(topology: Topology, host: HostId, prefix: str = "") -> list[WorkerView]:
    """Return the workers of a topology: `prefill-0`, `decode-0`, ... An empty topology means 1 prefill + 1 decode.

    `prefix` starts each name, so that names of different hosts differ.
    """
    if topology == Topology():
        topology = Topology(prefill=1, decode=1)
    counts: tuple[tuple[Role, int], ...] = (
        ("prefill", topology.prefill),
        ("decode", topology.decode),
        ("mixed", topology.mixed),
    )
    return [
        WorkerView(id=WorkerId(f"{prefix}{role}-{index}"), host=host, role=role)
        for role, count in counts
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """The part of this host that the workers of one model may use."""

    cores: tuple[int, ...]
    pledged_bytes: int = 0
    """Free memory that the arenas of other models will take."""


def divide_cores(wanted: Sequence[int], cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide cores among models. 0: an equal part of those that the other models leave, at least one core.

    Models share cores if there are more models than cores left. Raises ConfigError if too many cores are wanted.
    """
    left, sharing = list(cores), wanted.count(0)
    if sum(wanted) + min(1, sharing) > len(left):
        rest = ", and another model needs one" if sharing else ""
        raise ConfigError(
            f"the models name {sum(wanted)} cores{rest}, but this server has {len(left)}: lower `cores` of a model, or "
            "leave it out to share"
        )
    taken: list[tuple[int, ...]] = []
    for count in wanted:
        taken.append(tuple(left[:count]))
        del left[:count]
    each = max(1, len(left) // max(1, sharing))
    parts = (tuple(left[place * each % len(left) :][:each]) for place in range(sharing))
    return [cores or next(parts) for cores in taken]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory that is available for an arena."""

    free_bytes: int
    wanted_bytes: int
    """Default size, unless one full context needs more."""
    most_bytes: int
    """Limit of the default size."""


def host_budget(pledged_bytes: int = 0) -> MemoryBudget:
    """Return the budget of host memory: 2 GiB by default, at most a quarter of all and half of the free memory.

    `pledged_bytes`: free memory that other arenas will take.

    A share of the free memory alone would make the arena smaller after each restart, because processes of a killed
    host may still hold memory.
    """
    free_bytes = max(0, memory_free_bytes() - pledged_bytes)
    return memory_budget(free_bytes=free_bytes, total_bytes=memory_total_bytes())


def memory_budget(*, free_bytes: int, total_bytes: int) -> MemoryBudget:
    most_bytes = min(total_bytes // 4, free_bytes // 2)
    return MemoryBudget(free_bytes=free_bytes, wanted_bytes=_ARENA_BYTES_DEFAULT, most_bytes=most_bytes)


def blocks_total(config: Config, card: ModelCard, layout: KVLayout, budget: MemoryBudget) -> int:
    """Return the number of blocks in the arena.

    Raises ConfigError if the arena would hold less than two blocks or exceed the free memory. Without this check the
    server would start, because the system provides pages only on first use, and would be killed under load.
    """
    size_bytes = config.kv.bytes or _default_arena_bytes(card, layout, budget)
    blocks = config.kv.blocks or size_bytes // layout.block_bytes
    free_bytes = budget.free_bytes
    if blocks * layout.block_bytes > free_bytes:
        raise ConfigError(
            f"{blocks} KV blocks take {blocks * layout.block_bytes / 2**30:.1f} GiB, but only"
            f" {free_bytes / 2**30:.1f} GiB of memory are free (the limit of the control group counts, and so do the KV"
            " caches of other models); set kv.bytes or --kv-blocks to at most"
            f" {free_bytes // 2 // layout.block_bytes} blocks"
        )
    if blocks < 2 and not config.kv.blocks:
        raise ConfigError(
            f"kv.bytes is {size_bytes}, but one block of {layout.block_tokens} tokens takes {layout.block_bytes} bytes;"
            f" give at least {2 * layout.block_bytes}"
        )
    return blocks


def _default_arena_bytes(card: ModelCard, layout: KVLayout, budget: MemoryBudget) -> int:
    """Return the budget's default size, clamped to 1 to 64 full contexts and then to the budget's limit."""
    context_bytes = -(-card.context_tokens // layout.block_tokens) * layout.block_bytes
    wanted_bytes = min(max(budget.wanted_bytes, context_bytes), _CONTEXTS_MAX * context_bytes)
    return min(wanted_bytes, budget.most_bytes)


def workers_max(
    initial: int,
    *,
    threads: int,
    worker_bytes: int,
    shared_bytes: int,
    is_on_gpu: bool,
    cores: int | None = None,
) -> int:
    """Return how many workers the cores, the memory and the devices of this host can run; at least the initial ones.

    `threads`: threads of one worker. `worker_bytes`: weights that each worker loads itself. `shared_bytes`: arena and
    weights that all workers map. `cores`: number of cores that the workers may use. None: all of this process.
    A GPU runs the initial workers only: the arena takes the rest of its memory.
    """
    if is_on_gpu:
        return initial
    by_cores = (usable_cores() if cores is None else min(cores, usable_cores())) // threads
    by_memory = (memory_free_bytes() - shared_bytes) // (worker_bytes + _WORKER_BYTES)
    return max(initial, min(by_cores, by_memory))


def share_cores(
    workers: int, threads: int, quota: float = math.inf, cores: Sequence[int] | None = None
) -> list[tuple[int, tuple[int, ...]]]:
    """Divide cores among the workers. Return (threads, cores to pin to) for each worker.

    `cores`: those of one model. None: all of this process. `quota`: CPU quota of this process, in cores.

    Workers are pinned to different cores if there are enough, because two workers on one core slow each other down.
    They are not pinned if a CPU quota is below the number of cores: containers that share the cores would all pin
    their workers to the first ones.
    """
    own = own_cores()
    mine = own if cores is None else cores
    each = threads or max(1, math.ceil(min(quota * len(mine) / len(own), len(mine))) // workers)
    if quota < len(own) or each * workers > len(mine) or not hasattr(os, "sched_setaffinity"):
        return [(each, ())] * workers
    return [(each, tuple(mine[index * each : (index + 1) * each])) for index in range(workers)]


def neighbour_cores(shares: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the cores that each worker may borrow while their owner sleeps: those of the next worker, in a ring.

    Each core is lent to at most one worker. A worker that is not pinned borrows none.
    """
    if len(shares) < 2:
        return [()] * len(shares)
    return [cores for _, cores in (*shares[1:], shares[0])]


def raise_files_max() -> int:
    """Raise the limit of open files as far as the system allows, and return it. Each connection is one open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _FILES_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _FILES_MAX if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft  # a sandbox forbids the change
    return wanted
