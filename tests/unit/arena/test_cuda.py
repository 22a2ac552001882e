"""The arena in device memory over a driver made for tests: memory of the host, the driver's calls and rules.

What this cannot tell: whether PyTorch takes the memory over. tests/gpu does, where there is a GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from baton.arena.cuda import CudaArena, create_cuda_arena, open_cuda_arena
from baton.arena.cuda_driver import CudaDriver, CudaUnavailableError
from baton.core.config import Topology
from baton.core.errors import ArenaError, ConfigError
from baton.engine.hash_engine import hash_card
from baton.host.device import choose_device, device_room

SOURCE = Path(__file__).resolve().parents[2] / "data" / "fake_cuda.c"
BYTES = 3 << 20
READER = """
import ctypes, os, sys
from baton.arena.cuda import open_cuda_arena
from baton.arena.cuda_driver import CudaDriver
arena = open_cuda_arena(CudaDriver(0, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
last = arena.memory.address + arena.bytes_total - 5
print(ctypes.string_at(last, 5).decode())
ctypes.memmove(last, b"hello", 5)
arena.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here, and the driver for tests is written in C")
    path = tmp_path_factory.mktemp("cuda") / "libfakecuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lrt"], check=True)
    return str(path)


@pytest.fixture
def arena(library: str) -> Iterator[CudaArena]:
    made = create_cuda_arena(CudaDriver(0, library), BYTES)
    yield made
    made.close()


def test_another_process_reads_and_writes_the_same_bytes(arena: CudaArena, library: str) -> None:
    """The descriptor goes to it as it goes to a worker."""
    last = arena.memory.address + BYTES - 5
    ctypes.memmove(last, b"baton", 5)
    command = [sys.executable, "-c", READER, library, str(arena.fd), str(BYTES)]
    done = subprocess.run(command, pass_fds=[arena.fd], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "baton"), done.stderr
    assert ctypes.string_at(last, 5) == b"hello"


def test_the_memory_describes_itself_to_array_libraries(arena: CudaArena) -> None:
    interface = arena.memory.__cuda_array_interface__
    assert interface["shape"] == (BYTES,)
    assert interface["typestr"] == "|u1"
    assert interface["data"] == (arena.memory.address, False)


def test_closing_gives_the_memory_back(library: str) -> None:
    driver = CudaDriver(1, library)
    before = driver.free_bytes()
    made = create_cuda_arena(driver, BYTES)
    assert driver.free_bytes() == before - BYTES
    assert made.prefault(0) == BYTES
    made.close()
    assert driver.free_bytes() == before


def test_more_than_there_is_names_both_sizes(library: str) -> None:
    with pytest.raises(ArenaError, match=r"refuses 9\.00 GiB .* of 8\.00 GiB .* code 2: out of memory; set kv\.bytes"):
        create_cuda_arena(CudaDriver(0, library), 9 << 30)


def test_a_descriptor_without_a_handle_is_refused(library: str) -> None:
    fd = os.memfd_create("empty")
    with pytest.raises(ArenaError, match="holds 0 bytes, a CUDA handle has 64"):
        open_cuda_arena(CudaDriver(0, library), fd, BYTES)
    os.close(fd)


def test_a_device_that_is_not_there_is_refused(library: str) -> None:
    with pytest.raises(CudaUnavailableError, match="no device cuda:2: the driver sees 2"):
        CudaDriver(2, library)


def test_no_driver_says_so(tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailableError, match="no NVIDIA driver on this machine"):
        CudaDriver(0, str(tmp_path / "libcuda.so.1"))


def test_auto_is_the_cpu_where_no_gpu_is_usable(tmp_path: Path) -> None:
    card = hash_card()
    for choice in ("auto", "cpu"):
        assert choose_device(choice, card, str(tmp_path / "libcuda.so.1")).name == "cpu"


@pytest.mark.parametrize("choice", ["cuda", "cuda:1"])
def test_a_gpu_that_is_asked_for_and_not_there_is_a_config_error(choice: str, tmp_path: Path) -> None:
    """What is missing, and what to do: here the driver, or (first) a PyTorch with CUDA."""
    missing = r"torch \S+ is a build for CPUs|no NVIDIA driver"
    card = msgspec.structs.replace(hash_card(), format="safetensors")
    with pytest.raises(ConfigError, match=rf"--device is {choice}, but .*({missing}).*; use --device cpu"):
        choose_device(choice, card, str(tmp_path / "libcuda.so.1"))
    with pytest.raises(ConfigError, match="the hash model computes on the CPU only"):
        choose_device(choice, hash_card(), str(tmp_path / "libcuda.so.1"))


def test_room_is_what_workers_leave(library: str) -> None:
    """Of 8 GiB, each of two workers takes 2 GiB beside weights; nine tenths of the rest go to KV."""
    driver, card = CudaDriver(0, library), hash_card()
    room = device_room(driver, Topology(), card)
    assert room.free_bytes == 4 << 30
    assert room.most_bytes == room.free_bytes * 9 // 10
    assert device_room(driver, Topology(mixed=5), card).free_bytes == 0
