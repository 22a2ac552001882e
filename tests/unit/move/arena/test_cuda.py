"""The arena in device memory over a driver made for tests: memory of the host, the driver's calls and rules.

What this cannot tell: whether PyTorch takes the memory over. tests/gpu does, where there is a GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton.compute.decode_sizes import workspace_bytes
from baton.compute.hash_engine import hash_card
from baton.compute.models.resolve import resolve_model
from baton.core.config import Topology
from baton.core.errors import ArenaError, ConfigError, TransferError
from baton.decide.kv.layout import KVLayout
from baton.move.arena.cuda import CudaArena, create_cuda_arena, open_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver, CudaUnavailableError
from baton.move.arena.cuda_memory import CudaMemory
from baton.move.arena.opening import device_of_rank, places_of
from baton.move.transport.device_memory import CopyBuffer
from baton.serve.host.build import choose_device, device_budget, open_devices
from tests.fake_cuda import build

BYTES = 3 << 20
SHAPES = Path(__file__).resolve().parents[4] / "examples" / "shapes"
LAYOUT = KVLayout(layers=3, kv_heads=4, head_dim=2, block_tokens=4, dtype="float32")
SHARED = msgspec.structs.replace(LAYOUT, tensor_parallel=2, pipeline_parallel=2)
READER = """
import ctypes, os, sys
from baton.move.arena.cuda import open_cuda_arena
from baton.move.arena.cuda_driver import CudaDriver
arena = open_cuda_arena([(CudaDriver(0, sys.argv[1]), int(sys.argv[3]))], int(sys.argv[2]))
last = arena.memory.address + arena.bytes_total - 5
print(ctypes.string_at(last, 5).decode())
ctypes.memmove(last, b"hello", 5)
arena.close()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def arena(library: str) -> Iterator[CudaArena]:
    made = create_cuda_arena([(CudaDriver(0, library), BYTES)])
    yield made
    made.close()


def test_another_process_reads_and_writes_the_same_bytes(arena: CudaArena, library: str) -> None:
    """The process gets the descriptor as a worker does."""
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
    made = create_cuda_arena([(driver, BYTES)])
    assert driver.free_bytes() == before - BYTES
    assert made.prefault(0) == BYTES
    made.close()
    assert driver.free_bytes() == before


def test_more_than_there_is_names_both_sizes(library: str) -> None:
    with pytest.raises(ArenaError, match=r"refuses 9\.00 GiB .* of 8\.00 GiB .* code 2: out of memory; set kv\.bytes"):
        create_cuda_arena([(CudaDriver(0, library), 9 << 30)])


def test_a_descriptor_without_a_handle_is_refused(library: str) -> None:
    fd = os.memfd_create("empty")
    with pytest.raises(ArenaError, match="holds 0 bytes, 1 ranks have a CUDA handle of 64"):
        open_cuda_arena([(CudaDriver(0, library), BYTES)], fd)
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
        assert choose_device(choice, card, library=str(tmp_path / "libcuda.so.1")).name == "cpu"


@pytest.mark.parametrize("choice", ["cuda", "cuda:1"])
def test_a_gpu_that_is_asked_for_and_not_there_is_a_config_error(choice: str, tmp_path: Path) -> None:
    """The message names the missing part (PyTorch with CUDA, or the driver) and what to do."""
    missing = r"torch \S+ is a build for CPUs|no NVIDIA driver"
    card = msgspec.structs.replace(hash_card(), format="safetensors")
    with pytest.raises(ConfigError, match=rf"--device is {choice}, but .*({missing}).*; use --device cpu"):
        choose_device(choice, card, library=str(tmp_path / "libcuda.so.1"))
    with pytest.raises(ConfigError, match="the hash model computes on the CPU only"):
        choose_device(choice, hash_card(), library=str(tmp_path / "libcuda.so.1"))


def test_room_is_what_workers_leave(library: str) -> None:
    """Of 8 GiB, each of two workers needs 2 GiB beside its weights; nine tenths of the rest are for KV."""
    driver, card = CudaDriver(0, library), hash_card()
    layout = card.layout(block_tokens=4, dtype="uint8")
    room = device_budget([driver], Topology(), card, layout, 64)
    assert room.free_bytes == 4 << 30
    assert room.most_bytes == room.free_bytes * 9 // 10
    assert device_budget([driver], Topology(mixed=5), card, layout, 64).free_bytes == 0


def test_partial_results_of_split_decode_are_reserved(library: str) -> None:
    """DeepSeek-V2-Lite at its whole context: 320 splits and the last block, 16 heads, 512 + 1 numbers, two pools."""
    card = msgspec.structs.replace(resolve_model(str(SHAPES / "deepseek-v2-lite"), "dummy"), weight_bytes=0)
    layout = card.layout(block_tokens=16, dtype="bfloat16")
    reserved = [workspace_bytes(card, layout, requests) for requests in (1, 128)]
    assert reserved == [2 * requests * 16 * 321 * 513 * 4 for requests in (1, 128)]
    driver = CudaDriver(0, library)
    free = [device_budget([driver], Topology(mixed=1), card, layout, requests).free_bytes for requests in (1, 32)]
    assert free[0] - free[1] == 31 * reserved[0]
    halves = msgspec.structs.replace(layout, tensor_parallel=2)
    assert workspace_bytes(card, halves, 128) == reserved[1] // 2


def in_another_thread(call) -> None:
    """In a thread without a current context."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            call()
        except TransferError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def buffer(arena: CudaArena) -> Iterator[CopyBuffer]:
    made = CudaMemory(arena.parts, LAYOUT).buffer(1000)
    yield made
    made.close()


def test_bytes_go_out_and_in_by_any_thread(arena: CudaArena, buffer: CopyBuffer) -> None:
    """In the order of the moves, and complete after `wait`: this driver copies as late as possible."""
    ctypes.memmove(arena.memory.address, b"0123456789", 10)
    moves = np.array([[7, 0, 3], [0, 3, 2]])
    in_another_thread(lambda: buffer.copy_out(moves))
    in_another_thread(buffer.wait)
    assert bytes(buffer.memory[:5]) == b"78901"
    buffer.memory[:5] = b"abcde"
    in_another_thread(lambda: buffer.copy_in(np.add(moves, (100, 0, 0))))
    in_another_thread(buffer.wait)
    assert ctypes.string_at(arena.memory.address + 100, 10)[:2] == b"de"
    assert ctypes.string_at(arena.memory.address + 107, 3) == b"abc"


@pytest.mark.parametrize("move", [(BYTES - 1, 0, 2), (0, 999, 2)])
def test_a_copy_that_the_driver_refuses_is_a_failed_transfer(buffer: CopyBuffer, move: tuple[int, int, int]) -> None:
    """Beyond the arena, and beyond the buffer."""
    for begin in (buffer.copy_out, buffer.copy_in):
        with pytest.raises(TransferError, match=r"the GPU does not copy KV: .* code 1: invalid argument"):
            begin(np.array([move]))


def test_a_buffer_that_nobody_can_have_is_a_failed_transfer(arena: CudaArena) -> None:
    with pytest.raises(TransferError, match="cuMemHostAlloc failed"):
        CudaMemory(arena.parts, LAYOUT).buffer(0)


def test_ranks_have_their_own_parts_of_an_arena_and_of_its_room(library: str) -> None:
    """With two stages of 2 and 1 layers, the first stage's device limits the number of blocks."""
    drivers = [CudaDriver(index % 2, library) for index in range(4)]
    room = device_budget(drivers, Topology(mixed=1), hash_card(), SHARED, 64)
    assert room.free_bytes == (6 << 30) * SHARED.block_bytes // SHARED.shards[0].size_bytes
    made = create_cuda_arena(places_of(drivers, SHARED, 10))
    assert [part.array.bytes_total for part in made.parts] == [10 * shard.size_bytes for shard in SHARED.shards]
    assert made.bytes_total == 10 * SHARED.block_bytes
    assert os.fstat(made.fd).st_size == 4 * 64
    made.close()


def test_an_arena_that_does_not_fit_on_every_device_takes_none(library: str) -> None:
    drivers = [CudaDriver(index, library) for index in range(2)]
    before = drivers[0].free_bytes()
    with pytest.raises(ArenaError, match=r"refuses 9\.00 GiB"):
        create_cuda_arena([(drivers[0], BYTES), (drivers[1], 9 << 30)])
    assert drivers[0].free_bytes() == before


def test_blocks_of_several_ranks_are_their_parts_in_a_row(library: str) -> None:
    """Compared with a copy byte by byte, for runs with any start and end."""
    drivers, blocks = [CudaDriver(index % 2, library) for index in range(4)], 6
    made = create_cuda_arena(places_of(drivers, SHARED, blocks))
    size = blocks * SHARED.block_bytes
    content = random.Random(1).randbytes(size)
    for part, shard in zip(made.parts, SHARED.shards, strict=True):
        own = b"".join(
            content[first + shard.offset_bytes : first + shard.offset_bytes + shard.size_bytes]
            for first in range(0, size, SHARED.block_bytes)
        )
        ctypes.memmove(part.array.address, own, len(own))
    memory = CudaMemory(made.parts, SHARED)
    buffer = memory.buffer(size)
    buffer.copy_out(np.array([[0, 0, size]]))
    buffer.wait()
    assert bytes(buffer.memory) == content
    expected = bytearray(content)
    for offset, at, run in ((1, 100, 50), (SHARED.block_bytes - 3, 0, SHARED.block_bytes + 7), (size - 9, 400, 9)):
        expected[offset : offset + run] = content[at : at + run]
        buffer.copy_in(np.array([[offset, at, run]]))
        buffer.wait()
    buffer.copy_out(np.array([[0, 0, size]]))
    buffer.wait()
    assert bytes(buffer.memory) == expected
    buffer.close()
    made.close()


def test_fewer_devices_than_ranks_are_told_with_both_numbers(library: str) -> None:
    assert open_devices(0, 2, library).name == "cuda:0"
    with pytest.raises(ConfigError, match=r"2 ranks from cuda:1 on need a GPU each, and the driver sees 2 in all"):
        open_devices(1, 2, library)
    with pytest.raises(CudaUnavailableError, match="no device cuda:5"):
        open_devices(5, 2, library)


def test_ranks_take_the_devices_that_follow() -> None:
    assert [device_of_rank("cuda:2", rank) for rank in range(3)] == ["cuda:2", "cuda:3", "cuda:4"]
    assert device_of_rank("cpu", 3) == "cpu"
