"""The memory that this process may use: that of the machine, or of its control group if that is less."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from baton.move.control_groups import GROUPS, OWN, ControlGroup, own_groups, read_values

_MALLOPT_MMAP_THRESHOLD = -3
_UNLIMITED_BYTES = 1 << 62
"""Larger limits count as none: version 1 shows such a number for a group without a limit."""


def memory_total_bytes(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the memory of the machine, or the smallest limit of the control groups if that is less."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *(_limit_bytes(group) for group in own_groups("memory", groups, own))])


def memory_free_bytes(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the free memory of the machine, or what the control groups leave of their limits if that is less."""
    return max(0, min([_available_bytes(), *(_left_bytes(group) for group in own_groups("memory", groups, own))]))


def map_large_blocks() -> None:
    """Make glibc return each freed block above 128 KiB to the system at once.

    By default it raises this size to that of the largest freed block, and then each thread keeps twice as much memory.
    """
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).mallopt(_MALLOPT_MMAP_THRESHOLD, 128 * 1024)


def trim_heap() -> None:
    """Return free memory to the system, which glibc otherwise keeps below the last block in use. Takes milliseconds."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _available_bytes() -> int:
    words = read_values(Path("/proc/meminfo"))
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux: use the number of free pages


def _limit_bytes(group: ControlGroup) -> int:
    """Return the limit of one group. Above `memory.high` its processes slow down; above the others they are killed."""
    files = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    limits = [int(word) for file in files for word in read_values(group.folder / file) if word.isdecimal()]
    return min([_UNLIMITED_BYTES, *limits])


def _left_bytes(group: ControlGroup) -> int:
    """Return the unused part of a group's limit. Cached files count as unused, because the kernel can drop them."""
    limit_bytes = _limit_bytes(group)
    if limit_bytes == _UNLIMITED_BYTES:
        return limit_bytes
    used_file, prefix = ("memory.current", "") if group.version == 2 else ("memory.usage_in_bytes", "total_")
    used_bytes = sum(int(word) for word in read_values(group.folder / used_file))
    words = read_values(group.folder / "memory.stat")
    counts = dict(zip(words[::2], words[1::2], strict=False))
    cached_bytes = sum(int(counts.get(f"{prefix}{kind}", 0)) for kind in ("active_file", "inactive_file"))
    return limit_bytes - max(0, used_bytes - cached_bytes)
