"""Keys of other programs on a store's server."""

from __future__ import annotations

import pytest

from baton.core.types import BlockHash
from baton.move.store.slot_header import parse_block_hash


@pytest.mark.parametrize("text", ["readme.txt", "0f1", "0F", "0f 1e", "sub/0f", "\ufffd"])
def test_what_somebody_else_has_put_there_is_no_block(text: str) -> None:
    """A key that does not round-trip is not a block's name either."""
    assert parse_block_hash(text) is None


def test_a_block_is_read_by_its_name() -> None:
    assert parse_block_hash("0f1e") == BlockHash(b"\x0f\x1e")
