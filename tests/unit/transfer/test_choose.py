"""Which way a pull goes, and that both ways give the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from baton.arena.memfd import Arena, create_arena
from baton.core.errors import TransferError
from baton.machine.copies import Moves
from baton.transfer.choose import AutoTransport, open_transport, self_test, works
from baton.transfer.memory import MemoryExchange, MemoryTransport
from baton.transfer.port import Extent, Transport
from baton.transfer.shm import ShmTransport
from baton.transfer.tcp import TcpTransport

SIZE_BYTES = 1 << 16
ALL = [Extent(0, SIZE_BYTES)]
CONTENT = bytes(range(256)) * (SIZE_BYTES // 256)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _with_memory(opened: ExitStack, transport: Transport, *, shared: bool = True) -> Arena:
    arena = create_arena(SIZE_BYTES)
    opened.callback(arena.close)
    opened.callback(transport.close)
    transport.register(arena.memory, descriptor=arena.fd if shared else None)
    return arena


def _auto(opened: ExitStack, *, shared: bool = True) -> tuple[Transport, Arena]:
    transport = open_transport("auto", "127.0.0.1:0")
    return transport, _with_memory(opened, transport, shared=shared)


def test_memory_is_shared_on_one_machine(opened: ExitStack) -> None:
    """Nobody listens at the address for tcp that this ticket has."""
    (source, sent), (target, received) = _auto(opened), _auto(opened)
    sent.memory[:] = CONTENT
    ticket = source.offer(ALL, lease_s=60.0)
    _, _, near = ticket.address.partition(" ")
    target.pull(msgspec.structs.replace(ticket, address=f"127.0.0.1:1 {near}"), ALL).wait(60)
    assert bytes(received.memory) == CONTENT


@pytest.mark.parametrize("why", ["another machine", "another network", "it is gone", "no descriptor"])
def test_tcp_goes_where_memory_cannot_be_shared(opened: ExitStack, why: str) -> None:
    (source, sent), (target, received) = _auto(opened, shared=why != "no descriptor"), _auto(opened)
    sent.memory[:] = CONTENT
    ticket = source.offer(ALL, lease_s=60.0)
    far, _, near = ticket.address.partition(" ")
    assert bool(near) == (why != "no descriptor")
    boot, _, rest = near.partition(".")
    network, _, name = rest.partition("/")
    other = {
        "another machine": f"other.{network}/{name}",
        "another network": f"{boot}.1/{name}",
        "it is gone": f"{boot}.{network}/nobody",
        "no descriptor": "",
    }[why]
    target.pull(msgspec.structs.replace(ticket, address=f"{far} {other}".strip()), ALL).wait(60)
    assert bytes(received.memory) == CONTENT


def test_tickets_of_one_way_are_taken_too(opened: ExitStack) -> None:
    target, received = _auto(opened)
    for source in (TcpTransport("127.0.0.1:0"), ShmTransport()):
        sent = _with_memory(opened, source)
        sent.memory[:] = CONTENT
        received.memory[:] = bytes(SIZE_BYTES)
        target.pull(source.offer(ALL, lease_s=60.0), ALL).wait(60)
        assert bytes(received.memory) == CONTENT


def test_without_shared_memory_everything_goes_over_tcp(opened: ExitStack) -> None:
    source, (target, received) = AutoTransport("127.0.0.1:0", shared=False), _auto(opened)
    sent = _with_memory(opened, source)
    sent.memory[:] = CONTENT
    ticket = source.offer(ALL, lease_s=60.0)
    assert " " not in ticket.address
    target.pull(ticket, ALL).wait(60)
    assert bytes(received.memory) == CONTENT


def _wrong_copy(moves: Moves) -> None:
    ctypes.memset(int(moves[0, 1]), 7, 1)


def test_the_self_test_tells_what_works() -> None:
    exchange = MemoryExchange()
    self_test(lambda: TcpTransport("127.0.0.1:0"))
    self_test(ShmTransport)
    self_test(lambda: MemoryTransport(exchange))
    assert not works(lambda: MemoryTransport(MemoryExchange()))  # two that cannot see each other
    with pytest.raises(TransferError, match="other bytes"):
        self_test(lambda: MemoryTransport(exchange, copy=_wrong_copy))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", ":5", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(TransferError, match="address"):
        open_transport("tcp", address)


def test_an_address_that_is_taken_is_refused() -> None:
    first = TcpTransport("127.0.0.1:0")
    with pytest.raises(TransferError, match="cannot listen"):
        TcpTransport(first.address)
    first.close()
    shared = ShmTransport("taken-by-a-test")
    with pytest.raises(TransferError, match="cannot answer"):
        ShmTransport("taken-by-a-test")
    shared.close()
