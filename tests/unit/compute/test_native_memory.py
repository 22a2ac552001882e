"""The native engine under the address and undefined-behaviour sanitizers, with emulated AMX.

The same build compares the emulated AMX kernels with plain C++, on machines without AMX.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.compute.native.build import FULL_ENGINE
from baton.move.compiling import find_compiler
from tests.seeds import Seeds

ROOT = Path(__file__).resolve().parents[3]
SEEDS = 14
SANITIZED = (
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,alignment,object-size,pointer-overflow",
    "-fno-sanitize-recover=all",
    "--param=asan-instrumentation-with-call-threshold=0",
    "-DBATON_EMULATE_AMX",
)
"""Checks are out of line, and omit those of the address sanitizer: compiles half a minute faster."""


RECORD = ROOT / "tests" / "data" / "native_sanitized.txt"
"""A line "INSTRUCTIONS DIGEST" for each kind of processor on which these sources have passed the sanitizers.

A deep run that passes writes the line of its processor: commit it with the sources.
"""


COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def _sources_digest() -> str:
    """Digest the code of the native engine and its flags. Comments and white space do not count."""
    digest = hashlib.sha256(repr((FULL_ENGINE.flags, dict(FULL_ENGINE.units), SANITIZED, SEEDS)).encode())
    for source in sorted([*FULL_ENGINE.folder.glob("*.cpp"), *FULL_ENGINE.folder.glob("*.h")]):
        code = " ".join(COMMENTS.sub("", source.read_text()).split())
        digest.update(source.name.encode() + b"\0" + code.encode() + b"\0")
    return digest.hexdigest()


def _instructions() -> str:
    """Return the widest instruction set that the sanitizers can run here: avx512 includes the AMX emulation."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "avx512" if {"avx512_bf16", "avx512_vnni"} <= flags else "avx2" if "avx2" in flags else "plain"


def _passed() -> dict[str, str]:
    return dict(line.split() for line in RECORD.read_text().splitlines())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, seeds: Seeds) -> Path:
    """Compile with sanitizers: a minute of a core, so sources that have passed are left to deep runs."""
    if not seeds.deep and _sources_digest() in (_passed().get(_instructions()), _passed().get("avx512")):
        pytest.skip("these native sources have passed the sanitizers: make test-deep plays them again")
    path = tmp_path_factory.mktemp("sanitized") / "native.so"
    FULL_ENGINE.compile(find_compiler(), path, SANITIZED)
    return path


def _fuzz(library: Path) -> subprocess.CompletedProcess[str]:
    """Run random models in a process that uses the sanitizer's allocator from its start."""
    found = subprocess.run([find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory to the end
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "tests.unit.compute.native_fuzz", str(library), str(SEEDS)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_no_invalid_read_or_write(library: Path, seeds: Seeds) -> None:
    """Random models, ragged steps and block tables on every instruction set: equal to plain C++, and clean.

    A processor without AVX-512 plays and records its own instruction sets only.
    """
    done = _fuzz(library)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{SEEDS} models on {'AMX' if _instructions() == 'avx512' else ''}" in done.stdout
    if seeds.deep:
        record = {**_passed(), _instructions(): _sources_digest()}
        RECORD.write_text("".join(f"{name} {digest}\n" for name, digest in sorted(record.items())))


@pytest.mark.deep
def test_no_data_race(tmp_path: Path) -> None:
    """The same random models on several threads, under the thread sanitizer. It needs fixed addresses."""
    path = tmp_path / "native.so"
    FULL_ENGINE.compile(find_compiler(), path, ("-O1", "-fsanitize=thread"))
    found = subprocess.run([find_compiler(), "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    environment = {**os.environ, "LD_PRELOAD": found.stdout.strip(), "TSAN_OPTIONS": "exitcode=66 report_bugs=1"}
    command = ["setarch", "--addr-no-randomize", sys.executable, "-m", "tests.unit.compute.native_fuzz"]
    done = subprocess.run(
        [*command, str(path), str(SEEDS)], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{SEEDS} models on" in done.stdout
