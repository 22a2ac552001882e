"""The CPU cores and CPU time that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Return how many threads can run at once: the number of cores, or less under a CPU quota."""
    return max(1, math.ceil(min(cpu_quota(), len(own_cores()))))


def cpu_quota(groups: Path = _GROUPS, own: Path = _OWN) -> float:
    """Return the CPU quota of this process in cores: the smallest quota of its control group and the enclosing ones.

    It is infinite without a limit. Both versions of control groups are read, because a machine may have either or
    both. Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`) and Documentation/scheduler/sched-bwc.rst
    (`cpu.cfs_quota_us`).
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            quotas += [_quota_2(group) for group in _around(groups, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_1(group) for group in _around(groups / controllers, path)]
            quotas += [_quota_1(group) for group in _around(groups / "cpu", path)]  # a mount may have the short name
    return min(quotas)


def _around(mounted: Path, path: str) -> list[Path]:
    """Return a group and the enclosing ones. A container may see the machine's path; then only the root exists."""
    folder = mounted / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(mounted)]


def _quota_2(group: Path) -> float:
    """Read `cpu.max` of version 2: CPU time, or `max`, per period, both in microseconds."""
    try:
        time_us, period_us = (group / "cpu.max").read_text(encoding="ascii").split()
        return math.inf if time_us == "max" else int(time_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # the file does not exist: at the root, or without version 2


def _quota_1(group: Path) -> float:
    """Read the quota from the two files of version 1. Without a limit the time is -1."""
    try:
        time_us = int((group / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((group / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return time_us / period_us if time_us > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
