"""Size one host: how many blocks its arena has, which workers it runs, and which cores they own."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.compute.models.card import ModelCard
from baton.core.config import Config, Topology
from baton.core.errors import ConfigError
from baton.core.types import HostId, Role, WorkerId, WorkerView
from baton.decide.kv.layout import KVLayout
from baton.move.cores import own_cores

_ARENA_BYTES_DEFAULT = 2 * 2**30
_CONTEXTS_MAX = 64
_FILES_MAX = 65536


def worker_views(topology: Topology, host: HostId, prefix: str = "") -> list[WorkerView]:
    """Name the workers of a topology: `prefill-0`, `decode-0`, ... Nothing asked for means 1 prefill + 1 decode.

    `prefix` tells a host's workers from those of others.
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
class Room:
    """Memory that an arena may be made of."""

    free_bytes: int
    wanted_bytes: int
    """What it takes where nothing was said, if one context is not larger."""
    most_bytes: int
    """What it takes at most where nothing was said."""


def host_room() -> Room:
    """2 GiB, and never over a quarter of the free memory."""
    free_bytes = memory_free_bytes()
    return Room(free_bytes=free_bytes, wanted_bytes=_ARENA_BYTES_DEFAULT, most_bytes=free_bytes // 4)


def blocks_total(config: Config, card: ModelCard, layout: KVLayout, room: Room) -> int:
    """Choose how many blocks the arena has.

    Raises ConfigError where the arena would hold less than two blocks, or would not fit into the free memory: nobody
    notices at the start, because memory is reserved by use, and under load the system would kill the server.
    """
    size_bytes = config.kv.bytes or _default_arena_bytes(card, layout, room)
    blocks = config.kv.blocks or size_bytes // layout.block_bytes
    free_bytes = room.free_bytes
    if blocks * layout.block_bytes > free_bytes:
        raise ConfigError(
            f"{blocks} KV blocks take {blocks * layout.block_bytes / 2**30:.1f} GiB, but only"
            f" {free_bytes / 2**30:.1f} GiB of memory are free; set kv.bytes or --kv-blocks to at most"
            f" {free_bytes // 2 // layout.block_bytes} blocks"
        )
    if blocks < 2 and not config.kv.blocks:
        raise ConfigError(
            f"kv.bytes is {size_bytes}, but one block of {layout.block_tokens} tokens takes {layout.block_bytes} bytes;"
            f" give at least {2 * layout.block_bytes}"
        )
    return blocks


def _default_arena_bytes(card: ModelCard, layout: KVLayout, room: Room) -> int:
    """What the room wants, but at least one full context and at most 64 of them, and never over its share."""
    context_bytes = -(-card.context_tokens // layout.block_tokens) * layout.block_bytes
    wanted_bytes = min(max(room.wanted_bytes, context_bytes), _CONTEXTS_MAX * context_bytes)
    return min(wanted_bytes, room.most_bytes)


def memory_free_bytes() -> int:
    """Memory that this process could still get: of the machine, or of its control group where that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass  # not Linux: the free pages are what we know
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            free = min(free, int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # no such control group, or no limit in it
    return free


def share_cores(workers: int, threads: int, quota: float = math.inf) -> list[tuple[int, tuple[int, ...]]]:
    """Divide this process's cores among the workers: (threads, cores to pin to) for each.

    Cores are owned where there are enough: two workers that share a core disturb each other by more than they gain.
    With fewer cores than threads nobody is pinned. Nor where a quota of so many cores' time is less than the cores:
    then they are others' too, who would be pinned to the same ones.
    """
    cores = own_cores()
    each = threads or max(1, math.ceil(min(quota, len(cores))) // workers)
    if quota < len(cores) or each * workers > len(cores) or not hasattr(os, "sched_setaffinity"):
        return [(each, ())] * workers
    return [(each, tuple(cores[index * each : (index + 1) * each])) for index in range(workers)]


def neighbour_cores(shares: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Name the cores that each worker may use while their owner sleeps: those of the next one, and so around.

    So a core has one guest at most, however many workers there are. A worker that is not pinned has none.
    """
    if len(shares) < 2:
        return [()] * len(shares)
    return [cores for _, cores in (*shares[1:], shares[0])]


def raise_files_max() -> int:
    """Let this process open more files, where the system lets it. Returns how many: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _FILES_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _FILES_MAX if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft  # a sandbox that allows no change
    return wanted
