"""What a pool node shows of its blocks: each is found where it lies, or is asked for; never where another one lies."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest

from baton.move.ipc.lending import mapped
from baton.move.store.node_board import BlockBoard, PostedBlocks
from tests.stores import names

SLOTS = 1000


@pytest.fixture
def board() -> Iterator[BlockBoard]:
    made = BlockBoard(SLOTS)
    yield made
    made.close()


@pytest.fixture
def seen(board: BlockBoard) -> PostedBlocks:
    return PostedBlocks(mapped(board.descriptor, mmap.PROT_READ))


def _sum(number: int) -> bytes:
    return number.to_bytes(16)


def test_nearly_all_blocks_of_a_full_node_are_found(board: BlockBoard, seen: PostedBlocks) -> None:
    held = set(names(SLOTS))
    for number, name in enumerate(names(SLOTS)):
        board.post(name, _sum(number), number * 4096, held.__contains__)
    found = [seen.find(name) for name in names(SLOTS)]
    assert all(place in (None, (_sum(number), number * 4096)) for number, place in enumerate(found))
    assert found.count(None) < SLOTS // 20


def test_what_is_forgotten_makes_room(board: BlockBoard, seen: PostedBlocks) -> None:
    """Though nobody has cleared it: a node that has seen ten times as many blocks shows the last ones as well."""
    everything = names(10 * SLOTS)
    held: dict[bytes, None] = {}
    for number, name in enumerate(everything):
        held[name] = None
        if len(held) > SLOTS:
            del held[next(iter(held))]
        board.post(name, _sum(number), number, held.__contains__)
    last = [seen.find(name) for name in everything[-SLOTS:]]
    assert last.count(None) < SLOTS // 20


def test_a_block_that_is_shown_again_has_one_place(board: BlockBoard, seen: PostedBlocks) -> None:
    (name,) = names(1)
    for number in range(3):
        board.post(name, _sum(number), number, lambda _: True)
        assert seen.find(name) == (_sum(number), number)
    board.clear(name)
    assert seen.find(name) is None


def test_clearing_a_block_leaves_others(board: BlockBoard, seen: PostedBlocks) -> None:
    first, second, unknown = names(3)
    board.post(first, _sum(1), 1, lambda _: True)
    board.post(second, _sum(2), 2, lambda _: True)
    board.clear(first)
    board.clear(unknown)
    assert (seen.find(first), seen.find(second)) == (None, (_sum(2), 2))
