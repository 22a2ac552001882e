"""Real faults of a machine: full and broken disks, memory limits, a wall clock that jumps, a resolver that hangs."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from baton.move.control_groups import GROUPS, own_groups, read_values

_SOURCE = Path(__file__).resolve().parent / "data" / "machine_faults.c"


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit, of either version. Skips the test where none can be made."""
    version_1 = [group.folder for group in own_groups("memory") if group.version == 1 and group.folder.is_dir()]
    if version_1:
        folder, limit = version_1[0], "memory.limit_in_bytes"
    elif "memory" in read_values(GROUPS / "cgroup.subtree_control"):
        folder, limit = GROUPS, "memory.max"
    else:
        pytest.skip("needs a memory controller of control groups, which this machine or container does not offer")
    group = folder / f"baton-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"needs the right to make control groups: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size. Skips the test where none can be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


class BrokenDisk:
    """A real file system on a loop device, which a test breaks while a server uses it."""

    _SHUTDOWN = 0x8004587D
    """EXT4_IOC_SHUTDOWN: from then on every call fails with EIO. Its argument 2 drops all unwritten data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "disk"
        self._image = folder / "image"
        self.folder.mkdir()
        with self._image.open("wb") as image:
            image.truncate(32 << 20)
        self._run("mkfs.ext4", "-q", "-m", "0", str(self._image))
        self._run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.folder))

    def _run(self, *command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"needs the command {command[0]}")
        if done.returncode:
            pytest.skip(f"needs the right to mount an ext4 file system: {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def fail(self) -> None:
        """Let every read and write fail with an I/O error."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, self._SHUTDOWN, struct.pack("I", 2))
        finally:
            os.close(descriptor)

    def become_read_only(self) -> None:
        """Remount read-only under open files, as the kernel does after an error in the metadata."""
        device = Path(self._run("findmnt", "-no", "SOURCE", str(self.folder)).strip()).name
        try:
            Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
        except OSError as error:
            pytest.skip(f"needs a kernel with the trigger of ext4 errors: {error}")

    def fill(self) -> None:
        """Use the last free block."""
        with (self.folder / "filling").open("wb", 0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class PreloadedFaults:
    """Faults of a process that is started with `environment`: its clock jumps, its resolver hangs, its disk is slow."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("needs a C compiler, for a library that is loaded before the C library")
        library, shared = folder / "faults.so", folder / "faults"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"], check=True)
        shared.write_bytes(bytes(mmap.PAGESIZE))
        with shared.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment = {"LD_PRELOAD": str(library), "BATON_TEST_FAULTS": str(shared)}

    def move_clock(self, offset_s: int) -> None:
        """Move the wall clock this far from the real time."""
        struct.pack_into("l", self._shared, 0, offset_s)

    def hold_names(self, *, hold: bool) -> None:
        """Let the resolver wait, for the name localhost, until it is held no more."""
        struct.pack_into("l", self._shared, struct.calcsize("l"), int(hold))

    def delay_disk(self, delay_s: float) -> None:
        """Let every read and write of a file tier take this much longer. 0: no longer than the disk needs."""
        struct.pack_into("l", self._shared, 2 * struct.calcsize("l"), round(delay_s * 1e6))
