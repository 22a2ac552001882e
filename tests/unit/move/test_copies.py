"""Copies of many runs at once write the same bytes with and without a compiler, and no others."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.move import copies
from baton.move.copies import (
    PAST_CACHE_BYTES,
    Copy,
    MoveList,
    Runs,
    address_of,
    copy_one_by_one,
    fastest_copy,
    paired,
)

SIZE_BYTES = 3 * PAST_CACHE_BYTES


@pytest.fixture(params=["at once", "one by one"])
def copy(request: pytest.FixtureRequest) -> Copy:
    return fastest_copy() if request.param == "at once" else copy_one_by_one


def _runs(rng: random.Random, total_bytes: int, count: int) -> list[tuple[int, int]]:
    """Runs in any order that do not overlap, with gaps between them."""
    cuts = [0, *sorted(rng.sample(range(1, total_bytes), count - 1)), total_bytes]
    runs = [(cuts[i] + i * 3, cuts[i + 1] - cuts[i]) for i in range(count)]
    rng.shuffle(runs)
    return runs


def _at(memory: np.ndarray, runs: list[tuple[int, int]]) -> Runs:
    base = address_of(memoryview(memory))
    return np.array([(base + offset, size) for offset, size in runs], np.uint64)


def _joined(memory: np.ndarray, runs: list[tuple[int, int]]) -> bytes:
    return b"".join(memory[offset : offset + size].tobytes() for offset, size in runs)


@pytest.mark.parametrize("total_bytes", [1000, PAST_CACHE_BYTES - 1, PAST_CACHE_BYTES, 2 * PAST_CACHE_BYTES + 77])
def test_every_byte_comes_and_no_other_is_touched(copy: Copy, total_bytes: int) -> None:
    """In and beyond the size of the cache, with different cuts on both sides, at any alignment."""
    rng = random.Random(total_bytes)
    for _ in range(4):
        source = np.frombuffer(np.random.default_rng(rng.randrange(99)).bytes(SIZE_BYTES), np.uint8)
        target = np.zeros(SIZE_BYTES, np.uint8)
        theirs, ours = (_runs(rng, total_bytes, rng.randrange(1, 60)) for _ in range(2))
        copy(paired(_at(source, theirs), _at(target, ours)))
        assert _joined(target, ours) == _joined(source, theirs)
        for offset, size in ours:
            target[offset : offset + size] = 0
        assert not target.any()


def test_runs_that_are_cut_alike_are_not_cut_further() -> None:
    sources, targets = np.array([[10, 5], [90, 7]], np.uint64), np.array([[70, 5], [20, 7]], np.uint64)
    assert paired(sources, targets).tolist() == [[10, 70, 5], [90, 20, 7]]
    whole = np.array([[200, 12]], np.uint64)
    assert paired(sources, whole).tolist() == [[10, 200, 5], [90, 205, 7]]
    assert paired(whole, targets).tolist() == [[200, 70, 5], [205, 20, 7]]


def test_moves_of_any_run_of_bytes_can_be_cut_out() -> None:
    """For every start and end, also within one move. Addresses use all 64 bits, and the list is not modified."""
    rows = [[2**63 + 10, 70, 5], [2**63 + 90, 20, 7], [2**62 + 1, 30, 1]]
    moves = MoveList(np.array(rows, np.uint64))
    bytes_ = [(source + i, target + i) for source, target, size in rows for i in range(size)]
    for start in range(13):
        for end in range(start + 1, 14):
            cut = moves.cut(start, end - start).tolist()
            assert [(source + i, target + i) for source, target, size in cut for i in range(size)] == bytes_[start:end]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nor one that compiled it before
    copies.copy_library.cache_clear()
    yield
    copies.copy_library.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="baton.transfer"):
        assert fastest_copy() is copy_one_by_one
        assert fastest_copy() is copy_one_by_one
    (told,) = caplog.records
    assert "run by run" in told.getMessage()
    assert "install one" in told.getMessage()
