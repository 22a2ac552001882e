"""The CPU cores and CPU time that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from baton.move.control_groups import GROUPS, OWN, ControlGroup, own_groups, read_values


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many threads can run at once: the number of cores, or less under a CPU quota."""
    return max(1, math.ceil(min(cpu_quota(), len(own_cores()))))


def cpu_quota(groups: Path = GROUPS, own: Path = OWN) -> float:
    """Return the CPU quota of this process in cores: the smallest quota of its control group and the enclosing ones.

    It is infinite without a limit.
    """
    return min([math.inf, *(_quota(group) for group in own_groups("cpu", groups, own))])


def _quota(group: ControlGroup) -> float:
    """Return the CPU time per period of one group. Without a limit the time is `max`, or -1 in version 1."""
    files = ("cpu.max",) if group.version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = [word for file in files for word in read_values(group.folder / file)]
    try:
        time_us, period_us = map(int, words)
        return time_us / period_us if time_us > 0 else math.inf
    except (ValueError, ZeroDivisionError):
        return math.inf


def processor_features() -> frozenset[str]:
    """Return what this processor can do, by the names in /proc/cpuinfo, such as `avx2`. Empty: it does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())
