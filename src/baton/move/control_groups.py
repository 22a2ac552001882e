"""The control groups of this process, which bound its CPU time and memory.

Both versions are read, because a machine may have either or both. Source: Linux,
Documentation/admin-guide/cgroup-v2.rst and Documentation/admin-guide/cgroup-v1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group that contains this process."""

    folder: Path
    version: int


def own_groups(controller: str, groups: Path = GROUPS, own: Path = OWN) -> list[ControlGroup]:
    """Return the groups of this process that may have limits of a controller, and the enclosing ones."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # not Linux
    found: list[ControlGroup] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [ControlGroup(folder, 2) for folder in _around(groups, path)]
        elif controller in controllers.split(","):
            for mounted in dict.fromkeys((controllers, controller)):  # a mount may have the short name
                found += [ControlGroup(folder, 1) for folder in _around(groups / mounted, path)]
    return found


def read_values(file: Path) -> list[str]:
    """Return the words of a group's file. Empty: the file does not exist, as at the root of version 2."""
    try:
        return file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _around(mounted: Path, path: str) -> list[Path]:
    """Return a group and the enclosing ones. In a container only the root may exist: its path is the machine's."""
    folder = mounted / path.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(mounted)]
