"""The threads that copy: every failure in them reaches the waiting caller."""

from __future__ import annotations

import threading

import pytest

from baton.core.errors import TransferError
from baton.move.copies import Moves
from baton.move.transport.port import Extent
from tests.transfers.memory_transport import MemoryExchange, MemoryTransport

SIZE_BYTES = 1 << 16


def _broken(_moves: Moves) -> None:
    raise RuntimeError("a bug of a copy")


def test_a_copy_that_raises_what_nobody_expects_fails_its_pull_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    exchange = MemoryExchange()
    source = MemoryTransport(exchange)
    target = MemoryTransport(exchange, threads=1, copy=_broken)
    theirs, ours = memoryview(bytearray(SIZE_BYTES)), memoryview(bytearray(SIZE_BYTES))
    from_region, to_region = source.register(theirs), target.register(ours)
    ticket = source.offer([Extent(0, SIZE_BYTES, from_region)], lease_s=600.0)
    for _ in range(2):  # a new thread is there for the second one
        with pytest.raises(TransferError, match="a bug in Baton"):
            target.pull(ticket, [Extent(0, SIZE_BYTES, to_region)]).wait(30.0)
    for transport in (target, source):
        transport.close()
    assert [str(one.exc_value) for one in told] == ["a bug of a copy"] * 2


def test_a_pull_that_no_thread_can_be_started_for_fails_and_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = MemoryExchange()
    source, target = MemoryTransport(exchange), MemoryTransport(exchange)
    theirs, ours = memoryview(bytearray(b"a" * SIZE_BYTES)), memoryview(bytearray(SIZE_BYTES))
    from_region, to_region = source.register(theirs), target.register(ours)
    ticket = source.offer([Extent(0, SIZE_BYTES, from_region)], lease_s=600.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _refused)
        with pytest.raises(TransferError, match="can't start new thread"):
            target.pull(ticket, [Extent(0, SIZE_BYTES, to_region)]).wait(30.0)
    assert target.pull(ticket, [Extent(0, SIZE_BYTES, to_region)]).wait(30.0) == SIZE_BYTES
    assert ours == theirs
    for transport in (target, source):
        transport.close()


def _refused(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
