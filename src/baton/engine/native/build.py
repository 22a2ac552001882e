"""Compile the native engine once per machine: `python -m baton.engine.native.build`, or when it is first loaded.

The result is cached under a hash of everything that it is made from, and put in place by a rename: whoever finds the
file finds a whole one. No torch here, and no configuration: what the machine has decides.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off",
    "-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-pthread",
)  # fmt: skip
"""-ffp-contract=off: a sum is rounded as it is written, in every use; that a row's bits never depend on its company
rests on it. gcc warns of its own headers' deliberately undefined vectors, so that warning is off."""
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
UNITS: dict[str, tuple[str, ...]] = {
    "api": (),
    "memory": (),
    "pack": (),
    "plan": (),
    "quant_pack": (),
    "step": (),
    "team": (),
    "isa_plain": (),
    "isa_avx2": _AVX2,
    "isa_avx512": _AVX512,
    "isa_avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "isa_amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
}
"""Every translation unit, with the instructions that it may use."""


class NativeUnavailableError(Exception):
    """The native engine cannot run here; the message says why, and what would change it."""


def library_path() -> Path:
    """Return the compiled library, building it first where it is not cached. Raises NativeUnavailableError."""
    compiler = find_compiler()
    path = _cache_folder() / f"baton-native-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # workers start together: one builds, the others find it built
            if not path.exists():
                compile_library(compiler, path)
    except OSError as error:
        raise NativeUnavailableError(f"the native engine cannot be stored in {path.parent}: {error}") from error
    return path


def has_to_be_built() -> bool:
    """Tell whether `library_path` would compile, which takes about half a minute."""
    try:
        return not (_cache_folder() / f"baton-native-{_fingerprint(find_compiler())}.so").exists()
    except NativeUnavailableError:
        return False


def find_compiler() -> str:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise NativeUnavailableError(
            f"the native engine is written for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
        )
    found = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise NativeUnavailableError(
            f"no C++ compiler ({' or '.join(COMPILERS)}) on PATH; install one for a faster engine"
        )
    return found


def compile_library(compiler: str, path: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile all units, side by side, and link them. Raises NativeUnavailableError with the compiler's first words."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [str(Path(folder) / f"{unit}.o") for unit in UNITS]
        commands = [
            [compiler, *FLAGS, *flags, *extra, "-c", str(SOURCES / f"{unit}.cpp"), "-o", target]
            for (unit, flags), target in zip(UNITS.items(), objects, strict=True)
        ]
        running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for command in commands]
        said = [process.communicate()[1] for process in running]
        for process, words in zip(running, said, strict=True):
            _check(process.returncode, words)
        built = Path(folder) / "library.so"
        linked = subprocess.run(
            [compiler, "-shared", "-pthread", *extra, *objects, "-o", str(built)], capture_output=True, check=False
        )
        _check(linked.returncode, linked.stderr)
        built.replace(path)


def _check(code: int, words: bytes) -> None:
    if code != 0:
        lines = words.decode(errors="replace").splitlines() or ["(it gave no reason)"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise NativeUnavailableError(f"the C++ compiler ended with code {code}: {first}; g++ 11 or newer is needed")


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False)
    digest.update(version.stdout)
    digest.update(repr((FLAGS, UNITS)).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def _cache_folder() -> Path:
    """Where this user's caches lie. Source: XDG Base Directory Specification 0.8."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if Path(named).is_absolute() else Path.home() / ".cache") / "baton"


if __name__ == "__main__":
    try:
        library_path()
    except NativeUnavailableError as error:
        sys.exit(f"{error}; the torch engine will serve")
