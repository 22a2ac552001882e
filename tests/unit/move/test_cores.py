"""A CPU quota of either version of control groups limits the number of threads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from baton.move import cores
from baton.move.cores import cpu_quota, own_cores, usable_cores


@pytest.mark.parametrize(
    ("own", "limits", "quota"),
    [
        ("0::/a/b", {}, math.inf),
        ("0::/a/b", {"a/b": "max 100000"}, math.inf),
        ("0::/a/b", {"a/b": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b": "400000 100000", "a": "50000 100000"}, 0.5),
        ("0::/", {"": "200000 100000"}, 2.0),
        ("1:cpu:/a\n0::/c", {"a": "100000 100000", "c": "300000 100000"}, 3.0),
        ("0::/../elsewhere", {"": "200000 100000"}, 2.0),
        ("0::/a", {"a": "what is this"}, math.inf),
    ],
)
def test_the_least_quota_of_all_groups_around_counts(
    own: str, limits: dict[str, str], quota: float, tmp_path: Path
) -> None:
    """The files as a container sees them: its own group is the root, or one below it."""
    groups, mine = tmp_path / "groups", tmp_path / "cgroup"
    mine.write_text(own + "\n")
    for group, limit in limits.items():
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "cpu.max").write_text(limit + "\n")
    assert cpu_quota(groups, mine) == quota
    assert cpu_quota(groups, tmp_path / "none") == math.inf


@pytest.mark.parametrize(
    ("own", "limits", "quota"),
    [
        ("4:cpu,cpuacct:/a/b", {"cpu,cpuacct/a/b": (150000, 100000)}, 1.5),
        ("4:cpu,cpuacct:/a/b", {"cpu,cpuacct/a/b": (-1, 100000), "cpu,cpuacct/a": (50000, 100000)}, 0.5),
        ("4:cpu,cpuacct:/of/the/machine", {"cpu": (200000, 100000)}, 2.0),
        ("4:cpu:/a\n0::/c", {"cpu/a": (300000, 100000)}, 3.0),
        ("5:cpuset:/a", {"cpuset/a": (100000, 100000)}, math.inf),
        ("4:cpu:/a", {"cpu/a": (100000, 0)}, math.inf),
    ],
)
def test_control_groups_of_version_1_count_too(
    own: str, limits: dict[str, tuple[int, int]], quota: float, tmp_path: Path
) -> None:
    groups, mine = tmp_path / "groups", tmp_path / "cgroup"
    mine.write_text(own + "\n")
    for group, (time_us, period_us) in limits.items():
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "cpu.cfs_quota_us").write_text(f"{time_us}\n")
        (groups / group / "cpu.cfs_period_us").write_text(f"{period_us}\n")
    assert cpu_quota(groups, mine) == quota


@pytest.mark.parametrize(("quota", "threads"), [(0.2, 1), (1.0, 1), (math.inf, len(own_cores()))])
def test_as_many_threads_as_have_time(quota: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert usable_cores() == threads
