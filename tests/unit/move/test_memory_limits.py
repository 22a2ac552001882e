"""The limits of control groups of either version bound the memory that this process counts on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.move.memory_limits import memory_free_bytes, memory_total_bytes
from tests.machine_faults import limited_group

MIB = 1 << 20
STAT = "anon 1\ninactive_file {0}\nactive_file {0}\ntotal_inactive_file {1}\ntotal_active_file {1}\n"


def write_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def version_2(limit: object, used_mib: int = 0, cached_mib: int = 0) -> dict[str, str]:
    stat = STAT.format(cached_mib * MIB // 2, 0)
    return {"memory.max": f"{limit}\n", "memory.current": f"{used_mib * MIB}\n", "memory.stat": stat}


def version_1(limit: object, used_mib: int = 0, cached_mib: int = 0) -> dict[str, str]:
    stat = STAT.format(0, cached_mib * MIB // 2)
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used_mib * MIB}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("own", "files", "total_mib", "free_mib"),
    [
        ("0::/a/b", {"a/b": version_2(8 * MIB, 3)}, 8, 5),
        ("0::/a/b", {"a/b": version_2(8 * MIB, 3), "a": version_2(6 * MIB, 5)}, 6, 1),
        ("0::/a/b", {"a/b": version_2("max", 3), "a": version_2(6 * MIB, 5)}, 6, 1),
        ("0::/a", {"a": version_2(8 * MIB, 7, cached_mib=4)}, 8, 5),
        ("0::/a", {"a": version_2(8 * MIB, 9)}, 8, 0),
        ("0::/a", {"a": version_2(8 * MIB, 1) | {"memory.high": str(4 * MIB)}}, 4, 3),
        ("0::/of/the/machine", {"": version_2(8 * MIB, 3)}, 8, 5),
        ("4:memory:/a\n0::/", {"memory/a": version_1(8 * MIB, 3, cached_mib=2)}, 8, 7),
        ("4:memory:/a", {"memory/a": version_1(2**63 - 4096, 3), "memory": version_1(6 * MIB, 5)}, 6, 1),
        ("4:memory:/of/the/machine", {"memory": version_1(8 * MIB, 3)}, 8, 5),
    ],
)
def test_the_least_limit_of_all_groups_around_counts(
    own: str, files: dict[str, dict[str, str]], total_mib: int, free_mib: int, tmp_path: Path
) -> None:
    """What the group uses is taken off, without the cached files, which the kernel gives up for other uses."""
    groups, mine = tmp_path / "groups", tmp_path / "cgroup"
    mine.write_text(own + "\n")
    for group, contents in files.items():
        write_group(groups / group, contents)
    assert memory_total_bytes(groups, mine) == total_mib * MIB
    assert memory_free_bytes(groups, mine) == free_mib * MIB


@pytest.mark.parametrize("own", ["0::/a", "4:memory:/a", "5:cpu:/a", ""])
def test_without_a_limit_the_machine_counts(own: str, tmp_path: Path) -> None:
    groups, mine = tmp_path / "groups", tmp_path / "cgroup"
    mine.write_text(own + "\n")
    write_group(groups / "a", version_2("max"))
    write_group(groups / "memory/a", version_1(2**63 - 4096))
    write_group(groups / "cpu/a", version_2(MIB))
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (mine, tmp_path / "none"):
        assert memory_total_bytes(groups, path) == machine_bytes
        assert 0 < memory_free_bytes(groups, path) <= machine_bytes


def test_the_limit_of_a_real_control_group_is_found() -> None:
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from baton.move.memory_limits import memory_free_bytes, memory_total_bytes\n"
        "print(memory_total_bytes(), memory_free_bytes())"
    )
    with limited_group(512 * MIB) as group:
        command = [sys.executable, "-c", script, str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    total_bytes, free_bytes = map(int, done.stdout.split())
    assert total_bytes == 512 * MIB
    assert 400 * MIB < free_bytes < 512 * MIB


LARGE_BLOCKS = """
import sys, threading
from pathlib import Path
from baton.move.memory_limits import map_large_blocks, trim_heap

def used_bytes():
    return int(Path("/proc/self/smaps_rollup").read_text().split("Pss_Anon:")[1].split()[0]) << 10

def fill():
    for size in range(30 << 20, 34 << 20, 1 << 20):
        blocks = [b"x" * size, b"x" * (size // 2)]
        del blocks

if sys.argv[1] == "mapped":
    map_large_blocks()
before = used_bytes()
done, ending = threading.Semaphore(0), threading.Event()
for _ in range(2):
    threading.Thread(target=lambda: (fill(), done.release(), ending.wait())).start()
for _ in range(2):
    done.acquire()
trim_heap()
print(used_bytes() - before)
ending.set()
"""


def test_threads_keep_no_large_blocks() -> None:
    """Uploads of 32 MB left 50 MB with each of the threads that had read them."""
    command = [sys.executable, "-c", LARGE_BLOCKS, "mapped"]
    kept = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kept < 8 << 20, f"{kept >> 20} MiB"
