"""A store of several files: a slot's number determines its place, whatever the capacity."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from baton.move.store.file import FileStore
from baton.move.store.segments import slot_bytes
from tests.stores import get, names, put

BLOCK_BYTES, BLOCKS = 4096, 11
SLOT_BYTES = slot_bytes(BLOCK_BYTES)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three slots per file and growth by two, eleven blocks need four files."""
    monkeypatch.setattr("baton.move.store.segments.SEGMENT_BYTES", 3 * SLOT_BYTES + 100)
    monkeypatch.setattr("baton.move.store.segments.GROWTH_BYTES", 2 * SLOT_BYTES)


def _open(folder: Path, blocks: int = BLOCKS) -> FileStore:
    return FileStore(folder, layout_fingerprint="a", block_bytes=BLOCK_BYTES, capacity_bytes=blocks * SLOT_BYTES)


@pytest.mark.parametrize("indexed", [True, False])
def test_blocks_in_several_files_are_found_again(tmp_path: Path, *, indexed: bool) -> None:
    store = _open(tmp_path)
    assert put(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()
    sizes = [path.stat().st_size // SLOT_BYTES for path in sorted(tmp_path.glob("*.kv"))]
    assert sizes == [3, 3, 3, 2]
    if not indexed:
        (tmp_path / "index").unlink()
    store = _open(tmp_path)
    assert store.held() == names(BLOCKS)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_file_that_is_missing_takes_its_own_blocks_only(tmp_path: Path, *, indexed: bool) -> None:
    store = _open(tmp_path)
    put(store, names(BLOCKS), BLOCK_BYTES)
    store.close()
    (tmp_path / "segment-0001.kv").unlink()
    if not indexed:
        (tmp_path / "index").unlink()
    store = _open(tmp_path)
    there = [index not in (3, 4, 5) for index in range(BLOCKS)]
    assert get(store, names(BLOCKS), BLOCK_BYTES) == there
    assert put(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    assert store.counters.dropped == 0, "the file is made again, nobody has to make room"
    store.close()


def test_less_capacity_removes_files(tmp_path: Path) -> None:
    store = _open(tmp_path)
    put(store, names(BLOCKS), BLOCK_BYTES)
    store.close()
    store = _open(tmp_path, 4)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [index < 4 for index in range(BLOCKS)]
    assert len(list(tmp_path.glob("*.kv"))) == 2
    assert put(store, names(2, first=70), BLOCK_BYTES) == [True, True]
    assert len(store.held()) == 4
    store.close()


def test_closing_waits_for_the_calls_under_way(tmp_path: Path) -> None:
    """A put that overlaps a close keeps the blocks that it has reported; later puts are refused."""
    for turn in range(10):
        store, kept = _open(tmp_path / str(turn), 400), {}

        def fill(store: FileStore = store, kept: dict[int, list[bool]] = kept) -> None:
            for first in range(0, 400, 20):
                kept[first] = put(store, names(20, first=first), BLOCK_BYTES)

        filling = threading.Thread(target=fill)
        filling.start()
        store.close()
        filling.join()
        store = _open(tmp_path / str(turn), 400)
        for first, answers in kept.items():
            assert get(store, names(20, first=first), BLOCK_BYTES) == answers
        store.close()


def test_a_disk_with_room_for_less_than_a_piece_is_used_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growth is 64 slots, and the disk has room for five."""
    monkeypatch.setattr("baton.move.store.segments.SEGMENT_BYTES", 100 * SLOT_BYTES)
    monkeypatch.setattr("baton.move.store.segments.GROWTH_BYTES", 64 * SLOT_BYTES)
    allocate = os.posix_fallocate

    def short(fd: int, start: int, count: int) -> None:
        if start + count > 5 * SLOT_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, start, count)

    monkeypatch.setattr("os.posix_fallocate", short)
    store = _open(tmp_path)
    assert put(store, names(BLOCKS), BLOCK_BYTES).count(True) == 5
    assert sum(get(store, names(BLOCKS), BLOCK_BYTES)) == 5
    assert store.capacity_blocks == 5
    store.close()
