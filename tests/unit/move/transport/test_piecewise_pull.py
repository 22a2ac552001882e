"""A pull ends, whatever its last check of the offer raises."""

from __future__ import annotations

import pytest

from baton.core.errors import TransferError
from baton.move.transport.extents import Spread, rows_of
from baton.move.transport.piecewise_pull import PiecewisePull
from baton.move.transport.port import Extent, Ticket

TICKET = Ticket(transport="memory", address="a", epoch=1, number=1, secret=b"", extents=(Extent(0, 8),))


def _broken() -> None:
    raise LookupError("a bug of a check")


def test_a_check_that_raises_what_nobody_expects_fails_the_pull() -> None:
    target = Spread(rows_of(TICKET.extents), {0: memoryview(bytearray(8))})
    pull = PiecewisePull(TICKET, target, interrupt=lambda _: None, check=_broken)
    (piece,) = pull.pieces(8)
    assert pull.begin()
    with pytest.raises(LookupError):
        pull.landed(piece)
    with pytest.raises(TransferError, match="a bug in Baton"):
        pull.wait(0)
    pull.cancel()
