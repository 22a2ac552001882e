"""A damaged file causes misses and counts, never wrong bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.move.store.checksum import PART_BYTES
from baton.move.store.file import FileStore
from baton.move.store.segments import slot_bytes
from baton.move.store.slot_header import ALIGNMENT_BYTES, HEADER_BYTES
from tests.stores import get, names, put

BLOCK_BYTES, BLOCKS = 8192, 6
SLOT_BYTES = slot_bytes(BLOCK_BYTES)
SEGMENT = "segment-0000.kv"


def _open(folder: Path, *, blocks: int = BLOCKS, fingerprint: str = "a layout") -> FileStore:
    return FileStore(
        folder, layout_fingerprint=fingerprint, block_bytes=BLOCK_BYTES, capacity_bytes=blocks * SLOT_BYTES
    )


@pytest.fixture(params=["index", "scan"])
def opened_after(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Path], None]], FileStore]:
    """Fill and close a store, change its files, and open it again, with and without its index."""
    store = _open(tmp_path)
    assert all(put(store, names(BLOCKS), BLOCK_BYTES))
    store.close()
    if request.param == "scan":
        (tmp_path / "index").unlink()

    def open_after(harm: Callable[[Path], None]) -> FileStore:
        harm(tmp_path / SEGMENT)
        return _open(tmp_path)

    return open_after


def _overwrite(path: Path, offset_bytes: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(data)


def _flip(path: Path, offset_bytes: int, bit: int) -> None:
    byte = path.read_bytes()[offset_bytes]
    _overwrite(path, offset_bytes, bytes([byte ^ (1 << bit)]))


def test_a_flipped_bit_is_a_miss(opened_after, tmp_path: Path) -> None:
    """At any position in the header or block. Its neighbours are intact, and the slot is used again."""
    drawn = random.Random(4)
    places = [drawn.randrange(HEADER_BYTES) for _ in range(12)]
    places += [ALIGNMENT_BYTES + drawn.randrange(BLOCK_BYTES) for _ in range(12)]
    store = opened_after(lambda path: None)
    for number, place in enumerate(places):
        victim = number % BLOCKS
        store.close()
        _flip(tmp_path / SEGMENT, victim * SLOT_BYTES + place, number % 8)
        store = _open(tmp_path)
        assert get(store, names(BLOCKS), BLOCK_BYTES) == [index != victim for index in range(BLOCKS)]
        assert (store.counters.damaged, store.counters.misses) == (1, 1)
        assert names(BLOCKS)[victim] not in store.held()
        assert put(store, [names(BLOCKS)[victim]], BLOCK_BYTES) == [True]
        assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


def test_every_bit_of_a_header_counts(tmp_path: Path) -> None:
    """Every changed bit makes the slot empty, or leaves the block unchanged."""
    store = _open(tmp_path)
    put(store, names(1), BLOCK_BYTES)
    store.close()
    (tmp_path / "index").unlink()
    whole = (tmp_path / SEGMENT).read_bytes()[:HEADER_BYTES]
    for place in range(HEADER_BYTES):
        _flip(tmp_path / SEGMENT, place, place % 8)
        store = _open(tmp_path)
        assert (store.held(), store.counters.damaged) == ([], 1)
        store.close()
        (tmp_path / "index").unlink()
        _overwrite(tmp_path / SEGMENT, 0, whole)


@pytest.mark.parametrize("left_bytes", [0, 1, SLOT_BYTES - 1, 2 * SLOT_BYTES, 5 * SLOT_BYTES + ALIGNMENT_BYTES])
def test_what_a_cut_file_has_lost_is_a_miss(opened_after, left_bytes: int) -> None:
    store = opened_after(lambda path: os.truncate(path, left_bytes))
    whole = left_bytes // SLOT_BYTES
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [index < whole for index in range(BLOCKS)]
    assert put(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


LARGE_BYTES = 2 * PART_BYTES + 77
LARGE_SLOT_BYTES = slot_bytes(LARGE_BYTES)


def _open_large(folder: Path) -> FileStore:
    return FileStore(
        folder, layout_fingerprint="a layout", block_bytes=LARGE_BYTES, capacity_bytes=2 * LARGE_SLOT_BYTES
    )


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_flipped_bit_in_any_part_of_a_large_block_is_a_miss(tmp_path: Path, part: int) -> None:
    """Several threads read the parts of a block. The other block is intact."""
    store = _open_large(tmp_path)
    put(store, names(2), LARGE_BYTES)
    _flip(tmp_path / SEGMENT, LARGE_SLOT_BYTES + ALIGNMENT_BYTES + part * PART_BYTES + 50, 3)
    assert get(store, names(2), LARGE_BYTES) == [True, False]
    assert (store.counters.damaged, store.held()) == (1, names(1))
    assert put(store, names(2), LARGE_BYTES) == [True, True]
    assert get(store, names(2), LARGE_BYTES) == [True, True]
    store.close()


def test_parts_of_a_large_block_that_changed_places_are_a_miss(tmp_path: Path) -> None:
    store = _open_large(tmp_path)
    put(store, names(1), LARGE_BYTES)
    first, second = ((ALIGNMENT_BYTES + part * PART_BYTES, PART_BYTES) for part in range(2))
    data = (tmp_path / SEGMENT).read_bytes()
    for (place, _), (other, size_bytes) in ((first, second), (second, first)):
        _overwrite(tmp_path / SEGMENT, place, data[other : other + size_bytes])
    assert get(store, names(1), LARGE_BYTES) == [False]
    assert store.counters.damaged == 1
    store.close()


@pytest.mark.parametrize("left_bytes", [100, ALIGNMENT_BYTES + PART_BYTES, LARGE_SLOT_BYTES - 1])
def test_a_large_block_whose_file_ends_within_it_is_a_miss(tmp_path: Path, left_bytes: int) -> None:
    store = _open_large(tmp_path)
    put(store, names(2), LARGE_BYTES)
    os.truncate(tmp_path / SEGMENT, LARGE_SLOT_BYTES + left_bytes)
    assert get(store, names(2), LARGE_BYTES) == [True, False]
    assert store.counters.damaged == 1
    store.close()


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, LARGE_BYTES])
def test_a_disk_that_gives_nothing_back_is_a_miss_and_no_damage(tmp_path: Path, block_bytes: int) -> None:
    """An unreadable block is removed and stored elsewhere; the others may be intact."""
    store = FileStore(
        tmp_path, layout_fingerprint="a layout", block_bytes=block_bytes, capacity_bytes=4 * slot_bytes(block_bytes)
    )
    put(store, names(2), block_bytes)
    (segment,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if _leads_to(link, tmp_path / SEGMENT))
    whole = os.dup(segment)
    unreadable = os.open(tmp_path / SEGMENT, os.O_WRONLY)
    os.dup2(unreadable, segment)
    assert get(store, names(2), block_bytes) == [False, False]
    assert (store.counters.damaged, store.counters.io_errors > 0) == (0, True)
    os.dup2(whole, segment)
    assert put(store, names(2), block_bytes) == [True, True]
    assert get(store, names(2), block_bytes) == [True, True]
    store.close()
    os.close(whole)
    os.close(unreadable)


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except FileNotFoundError:  # of the listing itself
        return False


def test_a_file_that_is_cut_under_the_store_is_a_miss(tmp_path: Path) -> None:
    store = _open(tmp_path)
    put(store, names(BLOCKS), BLOCK_BYTES)
    os.truncate(tmp_path / SEGMENT, 2 * SLOT_BYTES + 100)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True, True, False, False, False, False]
    assert store.counters.damaged == 4
    assert put(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


def test_a_removed_segment_is_an_empty_one(opened_after) -> None:
    store = opened_after(lambda path: path.unlink())
    assert store.held() == []
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [False] * BLOCKS
    assert put(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


@pytest.mark.parametrize("written_bytes", [80, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 4096, SLOT_BYTES - 1])
def test_a_torn_write_is_a_miss(opened_after, tmp_path: Path, written_bytes: int) -> None:
    """A slot with the beginning of a new block and the end of the old one is empty."""
    other = tmp_path / "other"
    store = _open(other)
    put(store, names(BLOCKS, first=50), BLOCK_BYTES)
    store.close()
    new = (other / SEGMENT).read_bytes()
    store = opened_after(lambda path: _overwrite(path, 3 * SLOT_BYTES, new[3 * SLOT_BYTES :][:written_bytes]))
    found = get(store, [*names(BLOCKS), *names(BLOCKS, first=50)], BLOCK_BYTES)
    assert found == [index != 3 for index in range(BLOCKS)] + [False] * BLOCKS
    store.close()


def test_headers_that_changed_places_are_misses(opened_after) -> None:
    def swap(path: Path) -> None:
        data = path.read_bytes()
        _overwrite(path, SLOT_BYTES, data[4 * SLOT_BYTES :][:ALIGNMENT_BYTES])
        _overwrite(path, 4 * SLOT_BYTES, data[SLOT_BYTES:][:ALIGNMENT_BYTES])

    store = opened_after(swap)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True, False, True, True, False, True]
    assert store.counters.damaged == 2
    store.close()


def test_slots_that_changed_places_are_misses(opened_after) -> None:
    """Header and block match each other, but not their slot."""

    def swap(path: Path) -> None:
        data = path.read_bytes()
        _overwrite(path, 0, data[5 * SLOT_BYTES :][:SLOT_BYTES])
        _overwrite(path, 5 * SLOT_BYTES, data[:SLOT_BYTES])

    store = opened_after(swap)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [False, True, True, True, True, False]
    assert store.counters.damaged == 2
    store.close()


@pytest.mark.parametrize("harm", [b"", b"nonsense", None])
def test_a_damaged_index_is_not_believed(tmp_path: Path, harm: bytes | None) -> None:
    """None: change its last byte."""
    store = _open(tmp_path)
    put(store, names(BLOCKS), BLOCK_BYTES)
    store.close()
    index = tmp_path / "index"
    data = index.read_bytes()
    index.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if harm is None else harm)
    store = _open(tmp_path)
    assert store.held() == names(BLOCKS)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [True] * BLOCKS
    store.close()


def test_an_index_of_another_time_gives_no_wrong_block(tmp_path: Path) -> None:
    """As after restoring an old copy: every block that has moved since is a miss."""
    store = _open(tmp_path)
    put(store, names(BLOCKS), BLOCK_BYTES)
    store.close()
    old = (tmp_path / "index").read_bytes()
    store = _open(tmp_path)
    put(store, names(4, first=80), BLOCK_BYTES)
    store.close()
    (tmp_path / "index").write_bytes(old)
    store = _open(tmp_path)
    assert get(store, names(BLOCKS), BLOCK_BYTES) == [False] * 4 + [True] * 2
    store.close()


def test_an_emptied_slot_that_was_dropped_stays_whole_after_a_crash(tmp_path: Path) -> None:
    """After a crash two slots may have the same block: the younger one is used, the other is free."""
    store = _open(tmp_path)
    first, second = names(2)
    put(store, [first, second], BLOCK_BYTES)
    store.drop([first])
    put(store, names(1, first=30), BLOCK_BYTES)  # takes the first slot
    store.drop([second])
    put(store, [first], BLOCK_BYTES)
    store.close()
    (tmp_path / "index").unlink()
    store = _open(tmp_path)
    assert get(store, [first, *names(1, first=30)], BLOCK_BYTES) == [True, True]
    assert len(store.held()) == len(set(store.held()))
    store.close()
