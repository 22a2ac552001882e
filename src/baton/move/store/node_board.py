"""Where a pool node's blocks lie, for its own machine to see: who looks there needs not ask, and wakes no thread.

Nothing is pinned for who only looks. Its copy has the checksum that the row says, or the slot was given away meanwhile;
then it asks. So rows of blocks that were forgotten may go on standing until another one needs their place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from baton.core.types import BlockHash
from baton.move.ipc.board import Board, PostedRows
from baton.move.store.checksum import CHECKSUM_BYTES
from baton.move.store.node_wire import NAME_BYTES

_ROW = struct.Struct(f"<{NAME_BYTES}s{CHECKSUM_BYTES}sQ")
"""Name, checksum, where the block begins in the node's memory."""
_CHOICES = struct.Struct("<4I")
"""A name's places, by its own bytes: of twice as many rows as there are blocks one is nearly always free."""
_ROWS_A_SLOT = 2


class BlockBoard:
    """The node's side. Its owner locks."""

    def __init__(self, slots: int) -> None:
        """Raises OSError where there is no memory for it."""
        self._board = Board("baton-pool-blocks", rows=_ROWS_A_SLOT * slots, row_bytes=_ROW.size)
        self.descriptor = self._board.descriptor

    def post(self, name: BlockHash, checksum: bytes, offset_bytes: int, holds: Callable[[BlockHash], bool]) -> None:
        """Show a block. `holds` says of a name whether its row still means something."""
        choices = _CHOICES.unpack(name)
        standing = [BlockHash(self._board.row(place)[:NAME_BYTES]) for place in choices]
        if name in standing:
            place = choices[standing.index(name)]
        else:
            place = next((at for at, other in zip(choices, standing, strict=True) if not holds(other)), choices[0])
        self._board.post(place, _ROW.pack(name, checksum, offset_bytes))

    def clear(self, name: BlockHash) -> None:
        """Show it no more."""
        for place in _CHOICES.unpack(name):
            self._board.clear(place, name)

    def close(self) -> None:
        self._board.close()


class PostedBlocks:
    """The clients' side."""

    def __init__(self, memory: memoryview) -> None:
        self._rows = PostedRows(memory, _ROW.size)

    def find(self, name: BlockHash) -> tuple[bytes, int] | None:
        """A block's checksum and where it begins, as it stands just now. None: ask."""
        for place in _CHOICES.unpack(name):
            row = self._rows.row(place)
            if row is not None and row[:NAME_BYTES] == name:
                _, checksum, offset_bytes = _ROW.unpack(row)
                return checksum, offset_bytes
        return None
