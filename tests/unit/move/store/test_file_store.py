"""The folder of a file store: its lock, its description, its capacity, and a full disk."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from baton.core.errors import StoreError
from baton.move.store.direct_io import Scratches
from baton.move.store.file import FileStore
from baton.move.store.segments import GROWTH_BYTES, slot_bytes
from tests.machine_faults import small_disk
from tests.stores import get, names, put

BLOCK_BYTES = 64 << 10


def _open(folder: Path, blocks: int, *, fingerprint: str = "a layout", block_bytes: int = BLOCK_BYTES) -> FileStore:
    capacity_bytes = blocks * slot_bytes(block_bytes)
    return FileStore(folder, layout_fingerprint=fingerprint, block_bytes=block_bytes, capacity_bytes=capacity_bytes)


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    store = _open(tmp_path, 4)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        _open(tmp_path, 4)
    store.close()
    _open(tmp_path, 4).close()


@pytest.mark.parametrize("foreign", ["passwd", "index", "segment-0000.kv", "baton-store"])
def test_a_foreign_folder_is_refused_and_left_as_it_was(tmp_path: Path, foreign: str) -> None:
    """A name that a store uses too makes no store of a folder that has no description."""
    (tmp_path / foreign).write_text("precious")
    with pytest.raises(StoreError, match=f"{tmp_path} is no KV store and is not empty: it has {foreign}; give"):
        _open(tmp_path, 4)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(foreign, "precious")]


def test_a_store_with_foreign_files_beside_it_is_refused_without_a_marker(tmp_path: Path) -> None:
    _open(tmp_path, 4).close()
    (tmp_path / "baton-store").unlink()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(StoreError, match=r"it has notes\.txt; give the store an empty folder of its own"):
        _open(tmp_path, 4)


def test_a_store_of_an_older_version_gets_a_marker(tmp_path: Path) -> None:
    store = _open(tmp_path, 4)
    assert all(put(store, names(3), BLOCK_BYTES))
    store.close()
    (tmp_path / "baton-store").unlink()
    store = _open(tmp_path, 4)
    assert sorted(store.held()) == sorted(names(3))
    assert (tmp_path / "baton-store").is_file()
    store.close()


def test_a_new_file_system_is_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    _open(tmp_path, 4).close()


def test_the_marker_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that fails or is killed after it leaves a folder that the next start takes."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("baton.move.store.folder.open_private_fd", fail)
        with pytest.raises(StoreError, match="Input/output error"):
            _open(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["baton-store"]
    _open(tmp_path, 4).close()


@pytest.mark.parametrize("below", ["", "kv/below"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    """Nor a folder inside a file. The system's message, "exists", would mislead."""
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StoreError, match=f"{tmp_path}/taken is a file, and a folder is wanted"):
        _open(tmp_path / "taken" / below, 4)


def test_a_folder_that_may_not_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the kinds of its parents can be read then."""

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(StoreError, match=r"Permission denied.*; give it a folder that can be written"):
            _open(tmp_path / "closed", 4)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"fingerprint": "llama/float16"}, {"fingerprint": "llama/int8"}),
        ({"block_bytes": 65536}, {"block_bytes": 131072}),
    ],
)
def test_a_folder_of_another_layout_is_refused_and_left_alone(tmp_path: Path, there: dict, here: dict) -> None:
    """The error has both values, and the folder stays usable for its owner."""
    store = _open(tmp_path, 4, **there)
    put(store, names(2), there.get("block_bytes", BLOCK_BYTES))
    store.close()
    with pytest.raises(StoreError, match="a folder of its own") as refused:
        _open(tmp_path, 4, **here)
    assert all(repr(value) in str(refused.value) for value in (*there.values(), *here.values()))
    store = _open(tmp_path, 4, **there)
    assert store.held() == names(2)
    store.close()


def test_a_description_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(StoreError, match=r"store\.json"):
        _open(tmp_path, 4)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can be written"):
        _open(tmp_path / "file" / "store", 4)


def test_room_for_no_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no room for one block"):
        FileStore(tmp_path, layout_fingerprint="a", block_bytes=BLOCK_BYTES, capacity_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("indexed", [True, False])
def test_the_capacity_may_change_between_two_runs(tmp_path: Path, *, indexed: bool) -> None:
    """A smaller capacity cuts the files off; a larger one adds slots."""
    for blocks in (12, 5, 20):
        store = _open(tmp_path, blocks)
        held = store.held()
        assert get(store, held, BLOCK_BYTES) == [True] * len(held)
        put(store, names(30), BLOCK_BYTES)
        assert len(store.held()) == blocks
        store.close()
        if not indexed:
            (tmp_path / "index").unlink()
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == blocks * slot_bytes(BLOCK_BYTES)


def test_files_grow_as_they_fill(tmp_path: Path) -> None:
    """The capacity is a bound; an empty store takes less."""
    store = _open(tmp_path, 10 * GROWTH_BYTES // slot_bytes(BLOCK_BYTES))
    assert (tmp_path / "segment-0000.kv").stat().st_size == 0
    put(store, names(1), BLOCK_BYTES)
    assert 0 < (tmp_path / "segment-0000.kv").stat().st_size <= GROWTH_BYTES
    store.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with small_disk(tmp_path, 2 << 20) as disk:
        yield disk


def test_a_disk_without_any_room_keeps_nothing(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It raises nothing, logs one line, and counts an error."""
    store = _open(disk, 100)
    with pytest.raises(OSError, match="No space"):
        (disk / "something-else").write_bytes(bytes(3 << 20))
    with caplog.at_level(logging.WARNING, logger="baton.store"):
        assert put(store, names(3), BLOCK_BYTES) == [False] * 3
        assert put(store, names(3), BLOCK_BYTES) == [False] * 3
    assert [record.name for record in caplog.records] == ["baton.store"]
    assert "No space left" in caplog.text
    assert store.counters.io_errors == 1
    assert store.counters.refused == 6
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    store.close()


def test_a_disk_without_room_for_the_lock_is_an_error_that_leaves_no_descriptor(disk: Path) -> None:
    """The folder exists, but not one byte can be written."""
    _open(disk, 4).close()
    (disk / "lock").unlink()
    free_bytes = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
    (disk / "segment-9999.kv").write_bytes(bytes(free_bytes))
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(StoreError, match=r"No space left on device.*; give it a folder that can be written"):
        _open(disk, 4)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_without_memory_for_a_call_nothing_is_kept_and_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserved slots are free again, and stored blocks are found once there is memory."""
    store = _open(tmp_path, 4)
    assert put(store, names(2), BLOCK_BYTES) == [True] * 2

    def refuse(size_bytes: int) -> memoryview:
        raise OSError(errno.ENOMEM, f"no memory for {size_bytes} bytes")

    monkeypatch.setattr(Scratches, "borrowed", lambda _self: nullcontext(refuse(1)))
    for _ in range(3):
        assert put(store, names(2, first=100), BLOCK_BYTES) == [False] * 2
        assert get(store, names(2, first=100), BLOCK_BYTES) == [False] * 2
    monkeypatch.undo()
    assert put(store, names(2, first=100), BLOCK_BYTES) == [True] * 2
    assert get(store, [*names(2), *names(2, first=100)], BLOCK_BYTES) == [True] * 4
    store.close()


def test_without_more_threads_a_call_is_done_by_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _open(tmp_path, 600)

    def refuse(_self: ThreadPoolExecutor, _work: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    some = names(300)
    assert put(store, some, BLOCK_BYTES) == [True] * 300
    assert get(store, some, BLOCK_BYTES) == [True] * 300
    store.close()


LIMITED = """
import resource, sys
from pathlib import Path
from tests.unit.move.store.test_file_store import BLOCK_BYTES, _open
from tests.stores import get, names, put
store = _open(Path(sys.argv[1]), 100)
put(store, names(20), BLOCK_BYTES)
resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 68 * 1024, 10 * 68 * 1024))
some = names(20, first=100)
kept = put(store, some[:10], BLOCK_BYTES) + put(store, some[10:], BLOCK_BYTES)
assert get(store, some, BLOCK_BYTES) == kept
print(kept.count(True), store.counters.io_errors > 0)
"""


def test_a_write_that_fails_keeps_nothing(tmp_path: Path) -> None:
    """This process may not write some of the slots: their puts are refused, and all gets are correct."""
    source = str(Path(__file__).parents[4])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], cwd=source, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "True"]


def test_a_closed_store_leaves_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    for _ in range(3):
        store = _open(tmp_path, 40)
        put(store, names(40)[::2], BLOCK_BYTES)
        get(store, names(40), BLOCK_BYTES)
        store.close()
    with pytest.raises(StoreError):
        _open(tmp_path, 40, fingerprint="other")
    assert open_files() == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
