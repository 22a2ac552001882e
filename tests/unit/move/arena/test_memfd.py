"""The arena: one anonymous, sealed memory with many mappings, and clear errors."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import ArenaError
from baton.move.arena.memfd import Arena, create_arena, open_arena
from tests.machine_faults import small_disk

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sealed memory without a name is Linux's")

BYTES = 9 * 1024 * 1024 + 4096
"""More than one prefault step, and not a multiple of it."""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = create_arena(BYTES)
    yield made
    made.close()


def mapped_again(arena: Arena) -> Arena:
    return open_arena(os.dup(arena.fd), arena.bytes_total)


@pytest.mark.parametrize("size", [0, BYTES - 4096, BYTES + 4096])
def test_it_cannot_change_its_size_under_a_reader(arena: Arena, size: int) -> None:
    """A process that reads a removed page dies of SIGBUS."""
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size)
    assert os.fstat(arena.fd).st_size == BYTES


def test_the_seals_cannot_be_added_to(arena: Arena) -> None:
    """A worker that could seal the file against writing would break all others."""
    fcntl = pytest.importorskip("fcntl")
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_second_mapping_sees_the_bytes_of_the_first_and_the_other_way_round(arena: Arena) -> None:
    other = mapped_again(arena)
    arena.memory[100:105] = b"there"
    assert bytes(other.memory[100:105]) == b"there"
    other.memory[BYTES - 4 :] = b"back"
    assert bytes(arena.memory[BYTES - 4 :]) == b"back"
    other.close()


def test_the_memory_outlives_the_mapping_of_its_creator() -> None:
    """Workers keep their blocks after the server has closed its own mapping."""
    first = create_arena(4096)
    first.memory[:4] = b"kept"
    second = mapped_again(first)
    first.close()
    assert bytes(second.memory[:4]) == b"kept"
    second.close()


def test_prefault_covers_the_arena_and_leaves_alone_what_another_mapping_writes(arena: Arena) -> None:
    """At every position, and in pages that are prefaulted after they were written."""
    other = mapped_again(arena)
    places = [0, 4095, 8 * 1024 * 1024 - 1, 8 * 1024 * 1024, BYTES - 1]
    start, rounds = 0, 0
    while start < arena.bytes_total:
        for place in places:
            other.memory[place] = 100 + rounds
        moved = arena.prefault(start)
        assert moved > start, "no progress"
        start, rounds = moved, rounds + 1
        assert [arena.memory[place] for place in places] == [99 + rounds] * len(places)
    assert start == BYTES
    assert rounds <= 3
    assert arena.prefault(BYTES) == BYTES
    assert sum(1 for byte in bytes(arena.memory) if byte) == len(places)
    other.close()


def test_prefault_reserves_the_pages(arena: Arena) -> None:
    """The file has its pages before the first write, so that no step pays for it."""
    assert os.fstat(arena.fd).st_blocks == 0
    moved = arena.prefault(0)
    if moved == BYTES:
        pytest.skip("this kernel cannot prefault")
    assert os.fstat(arena.fd).st_blocks * 512 >= moved


def test_prefault_takes_large_pages_even_beside_a_mapping_that_has_written_small_ones(arena: Arena) -> None:
    """Steps over long contexts are 6 to 15 % faster with them. Bytes that are there stay."""
    arena.memory[3 << 20] = 7
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel cannot collapse shared memory")
    arena.prefault(0)
    with large_page_view(arena) as view:
        assert view[1 << 20] == 7
        entry = Path("/proc/self/smaps").read_text().split(f"{ctypes.addressof(view):x}-", 1)[1]
        assert "ShmemPmdMapped:     2048 kB" in entry.split("VmFlags")[0]


@contextlib.contextmanager
def large_page_view(arena: Arena) -> Iterator[ctypes.Array[ctypes.c_uint8]]:
    """Map the second large page of the arena at a multiple of its size."""
    size = 2 << 20
    reserved = mmap.mmap(-1, 2 * size)
    place = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    place += -place % size
    system = ctypes.CDLL(None)
    system.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    system.mmap(place, size, mmap.PROT_READ, mmap.MAP_SHARED | 0x10, arena.fd, size)
    yield (ctypes.c_uint8 * size).from_address(place)
    reserved.close()


def test_memory_that_the_system_does_not_have_is_an_error_and_no_signal(tmp_path: Path, arena: Arena) -> None:
    """Otherwise SIGBUS would kill the process that writes such a page first."""
    if arena.prefault(0) == BYTES:
        pytest.skip("this kernel cannot prefault")
    with small_disk(tmp_path, 2 << 20) as disk, (disk / "arena").open("w+b") as file:
        file.truncate(BYTES)
        small = open_arena(os.dup(file.fileno()), BYTES)
        with pytest.raises(ArenaError, match=r"takes 0\.01 GiB, but .* set kv\.bytes or --kv-blocks to less"):
            small.prefault(0)
        small.close()


@pytest.mark.parametrize("size", [2**62, 2**63, 0, -1])
def test_a_size_that_the_host_refuses_says_what_to_set_and_leaves_nothing_open(size: int) -> None:
    before = sorted(Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").exists() else []
    with pytest.raises(ArenaError, match=r"kv\.bytes"):
        create_arena(size)
    after = sorted(Path("/proc/self/fd").iterdir()) if before else []
    assert after == before


def test_a_descriptor_of_another_size_is_refused_with_both_numbers(arena: Arena) -> None:
    copy = os.dup(arena.fd)
    with pytest.raises(ArenaError, match=f"{BYTES} bytes, but {BYTES + mmap.PAGESIZE} were announced"):
        open_arena(copy, BYTES + mmap.PAGESIZE)
    os.close(copy)
