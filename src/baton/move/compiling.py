"""Compile Baton's C++ sources on first use, once per machine.

The library is cached under a hash of its sources, flags and platform. A rename puts it in place, so that other
processes see a complete file. A cache folder that another user can write to is refused, because a library is code.
Then, and for a read-only home, a private folder among the temporary files is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core.files import make_private_folder, open_private

log = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++")
MACHINES = ("x86_64", "aarch64")
"""Kinds of processors, as Linux names them, for which the C++ code is written."""


class NativeUnavailableError(Exception):
    """Baton's C++ code cannot run on this machine. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeSources:
    """The sources of one library, and the flags to compile them."""

    name: str
    """Prefix of the library's file name."""
    folder: Path
    """Folder of the sources. The cache key includes every .cpp and .h file in it."""
    flags: tuple[str, ...]
    units: Mapping[str, tuple[str, ...]]
    """Translation units, each with additional flags for the instructions that it may use."""
    headers: tuple[Path, ...] = ()
    """Headers of another folder, which the cache key includes too."""

    def library_path(self) -> Path:
        """Return the path of the compiled library. Compile it if it is not cached. Raises NativeUnavailableError."""
        if (cached := self.cached()) is not None:
            return cached
        compiler = find_compiler()
        problems: list[str] = []
        for folder in _cache_folders():
            try:
                _make_private(folder)
                return self._compiled(compiler, folder / self._file_name())
            except OSError as error:
                log.warning("%s is not kept in %s: %s", self.name, folder, error)
                problems.append(str(error))
        raise NativeUnavailableError(f"{self.name} cannot be stored: {'; '.join(problems)}")

    def has_to_be_built(self) -> bool:
        """Return whether `library_path` would compile."""
        try:
            return self.cached() is None and bool(find_compiler())
        except NativeUnavailableError:
            return False

    def build_problem(self) -> str:
        """Return why the library is neither cached nor can be compiled. Empty: it is, or it can."""
        try:
            self.cached() or find_compiler()
        except NativeUnavailableError as error:
            return str(error)
        return ""

    def compile(self, compiler: str, path: Path, extra: tuple[str, ...] = ()) -> None:
        """Compile all units in parallel, and link them. Raises NativeUnavailableError with the first error line."""
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = [str(Path(folder) / f"{unit}.o") for unit in self.units]
            commands = [
                [compiler, *self.flags, *flags, *extra, "-c", str(self.folder / f"{unit}.cpp"), "-o", target]
                for (unit, flags), target in zip(self.units.items(), objects, strict=True)
            ]
            running = [
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands
            ]
            outputs = [process.communicate()[1] for process in running]
            for process, output in zip(running, outputs, strict=True):
                _check(process.returncode, output)
            built = Path(folder) / "library.so"
            linked = subprocess.run(
                [compiler, "-shared", "-pthread", *extra, *objects, "-o", str(built)], capture_output=True, check=False
            )
            _check(linked.returncode, linked.stderr)
            built.chmod(0o600)  # the linker sets the mode by the umask, which may allow more
            built.replace(path)

    def cached(self) -> Path | None:
        """Return the path of the library in a folder that no other user can write to, or None."""
        paths = [folder / self._file_name() for folder in _cache_folders() if not _refusal(folder)]
        return next((path for path in paths if path.is_file()), None)

    def _compiled(self, compiler: str, path: Path) -> Path:
        with open_private(path.with_suffix(".lock"), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that start together, only one compiles
            if not path.exists():
                self.compile(compiler, path)
        return path

    def _file_name(self) -> str:
        digest = hashlib.sha256(repr((_machine(), self.flags, dict(self.units))).encode())
        for source in sorted([*self.folder.glob("*.cpp"), *self.folder.glob("*.h"), *self.headers]):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return f"{self.name}-{digest.hexdigest()[:20]}.so"


def _machine() -> tuple[str, str, str]:
    """Return the platform that a library must match: system, processor and version of the C library.

    The library itself checks the processor's instructions at run time.
    """
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    return sys.platform, platform.machine(), libc or "another C library"


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises NativeUnavailableError."""
    if platform.machine() not in MACHINES or sys.platform != "linux":
        raise NativeUnavailableError(
            f"Baton's C++ code is written for Linux on {' or '.join(MACHINES)}, "
            f"this is {sys.platform} on {platform.machine()}"
        )
    found = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise NativeUnavailableError(
            f"no C++ compiler ({' or '.join(COMPILERS)}) on PATH; install one for a faster engine and faster copies"
        )
    return found


def _check(code: int, output: bytes) -> None:
    if code != 0:
        lines = output.decode(errors="replace").splitlines() or ["(no output)"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise NativeUnavailableError(f"the C++ compiler ended with code {code}: {first}; g++ 11 or newer is needed")


def _cache_folders() -> list[Path]:
    """Return the folders for libraries, the preferred first: the user's cache, and one among the temporary files.

    Source: XDG Base Directory Specification 0.8.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    private = Path(tempfile.gettempdir()) / f"baton-{os.geteuid()}"
    try:
        return [(Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "baton", private]
    except RuntimeError:  # a user without a home
        return [private]


def _make_private(folder: Path) -> None:
    """Create a folder that this user alone can access. Raises OSError if another user owns it or can write to it."""
    make_private_folder(folder)
    if problem := _refusal(folder):
        raise PermissionError(problem)
    folder.chmod(0o700)


def _refusal(folder: Path) -> str:
    """Return why the libraries of a folder must not be loaded; empty if they may be."""
    try:
        entry, target = folder.lstat(), folder.stat()
    except OSError as error:
        return str(error)
    foreign = {entry.st_uid, target.st_uid} - {0, os.geteuid()}
    if foreign:
        return f"{folder} belongs to user {foreign.pop()}: remove it, or set XDG_CACHE_HOME"
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(target.st_mode)
        return f"other users can write to {folder} (mode {mode:o}): remove it, and Baton makes a private one"
    return ""
