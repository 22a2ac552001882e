"""How much of this machine's processors this process may use: which cores, and how much of their time."""

from __future__ import annotations

import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def own_cores() -> list[int]:
    """List the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Say how many threads can run at once: those of all cores of ours, or fewer where a quota allows less time."""
    return max(1, math.ceil(min(cpu_quota(), len(own_cores()))))


def cpu_quota(groups: Path = _GROUPS, own: Path = _OWN) -> float:
    """Say how many cores' time this process may use: the least that its control group and those around it allow.

    Infinity where nothing is limited. Control groups of both versions are read, as a machine may have either or both.
    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`) and Documentation/scheduler/sched-bwc.rst
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
            quotas += [_quota_1(group) for group in _around(groups / "cpu", path)]  # mounted under the short name alone
    return min(quotas)


def _around(mounted: Path, path: str) -> list[Path]:
    """List a group and those around it. In a container the path may be the machine's: then only the root is there."""
    folder = mounted / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(mounted)]


def _quota_2(group: Path) -> float:
    """Read `cpu.max`: microseconds of CPU time, or `max`, in every period of so many."""
    try:
        time_us, period_us = (group / "cpu.max").read_text(encoding="ascii").split()
        return math.inf if time_us == "max" else int(time_us) / int(period_us)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # no such group, as at the root, or none of version 2


def _quota_1(group: Path) -> float:
    """Read the same from the two files of version 1. Without a limit the time is -1."""
    try:
        time_us = int((group / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period_us = int((group / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return time_us / period_us if time_us > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
