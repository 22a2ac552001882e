"""A slot that is being read is not reused."""

from __future__ import annotations

from baton.move.store.slot_table import SlotTable
from tests.stores import names

A, B, C = names(3)


def _filled() -> SlotTable:
    table = SlotTable()
    table.add_free([0, 1])
    slots, _ = table.reserve(2)
    for name, slot in zip((A, B), slots, strict=True):
        table.keep(name, slot)
    return table


def test_making_room_passes_over_what_is_being_read() -> None:
    """The oldest block is being read, so the next one is evicted."""
    table = _filled()
    assert table.begin_read(A) == 0
    assert table.reserve(1) == ([1], 1)
    assert table.items() == [(A, 0)]
    assert table.reserve(1) == ([], 0), "all there is is being read"
    table.end_read(0)
    assert table.reserve(1) == ([0], 1)


def test_a_dropped_slot_is_free_when_its_last_reader_is_done() -> None:
    table = _filled()
    assert (table.begin_read(A), table.begin_read(A)) == (0, 0)
    assert table.forget(A)
    assert table.begin_read(A) is None
    table.end_read(0)
    assert table.free_slots() == 0
    table.end_read(0)
    assert table.reserve(1) == ([0], 0)


def test_a_slot_that_holds_another_block_by_now_is_not_forgotten() -> None:
    table = _filled()
    assert not table.forget(A, slot=1)
    assert table.forget(A, slot=0)
    assert not table.forget(A)


def test_a_block_that_comes_twice_gives_its_second_slot_back() -> None:
    table = _filled()
    table.forget(B)
    slots, _ = table.reserve(1)
    assert not table.keep(A, slots[0])
    assert table.free_slots() == 1
    assert table.items() == [(A, 0)]


def test_a_block_that_is_put_again_outlives_the_others() -> None:
    table = _filled()
    assert table.refresh(A)
    assert not table.refresh(C)
    assert table.reserve(1) == ([1], 1)
    assert table.items() == [(A, 0)]
