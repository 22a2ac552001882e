"""A libcuda for machines without a GPU, whose devices are memory of the host (`tests/data/fake_cuda.c`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent / "data" / "fake_cuda.c"


def build(folder: Path) -> str:
    """Compile it. Returns its path: under the name of the real one, so that LD_LIBRARY_PATH gives it to a process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, and the driver for tests is written in C")
    path = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lrt", "-pthread"], check=True)
    return str(path)
