"""Shared memory: borrowing without a copy, and permission to map memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import msgspec
import pytest

from baton.core.errors import TransferError
from baton.move.transport.offers import SECRET_BYTES, OfferStatus
from baton.move.transport.port import Extent, Ticket
from baton.move.transport.shm import ShmTransport
from baton.move.transport.source_client import OfferQuery, SourceClient
from baton.move.transport.wire import Verb
from tests.transfers.kits import ROOT, Kit, kit_of, offered

SIZE_BYTES = 1 << 20


@pytest.fixture
def kit() -> Iterator[Kit]:
    with kit_of("shm") as made:
        yield made


def test_an_offer_can_be_read_where_it_lies(kit: Kit) -> None:
    """Without a copy: a change at the source is visible, and the views are read-only."""
    source, target = kit.side(), kit.side()
    assert isinstance(target.transport, ShmTransport)
    source.fill(1)
    ticket = source.transport.offer([Extent(100, 50, source.region), Extent(7, 3, source.region)], lease_s=600.0)
    with target.transport.borrow(ticket) as views:
        assert b"".join(views) == source.read(ticket.extents)
        source.arena.memory[100] ^= 1
        assert views[0][0] == source.arena.memory[100]
        assert all(view.readonly for view in views)
        del views


def test_what_was_borrowed_when_the_offer_ended_is_refused(kit: Kit) -> None:
    source, target = kit.side(), kit.side()
    assert isinstance(target.transport, ShmTransport)
    ticket, _ = offered(source)

    def read() -> None:
        with target.transport.borrow(ticket) as views:
            source.transport.withdraw(ticket)
            del views

    with pytest.raises(TransferError, match="withdrawn"):
        read()


def test_memory_without_a_descriptor_is_not_offered(kit: Kit) -> None:
    side = kit.side()
    region = side.transport.register(memoryview(bytearray(100)))
    with pytest.raises(TransferError, match="descriptor"):
        side.transport.offer([Extent(0, 100, region)], lease_s=600.0)


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_a_file_that_could_shrink_is_not_mapped(kit: Kit, kind: str) -> None:
    """Reading behind the end of a file kills the process."""
    source, target = kit.side(), kit.side()
    with tempfile.TemporaryFile() if kind == "file" else open(os.memfd_create("unsealed"), "r+b") as file:
        file.truncate(100)
        region = source.transport.register(memoryview(bytearray(100)), descriptor=file.fileno())
    ticket = source.transport.offer([Extent(0, 100, region)], lease_s=600.0)
    with pytest.raises(TransferError, match="sealed"):
        target.transport.pull(ticket, [Extent(0, 100)]).wait(60)


def test_another_machine_is_told_by_its_address(kit: Kit) -> None:
    source, target = kit.side(), kit.side()
    ticket, _ = offered(source)
    far = msgspec.structs.replace(ticket, address="elsewhere.1/" + ticket.address.partition("/")[2])
    with pytest.raises(TransferError, match="another machine"):
        target.transport.pull(far, target.whole())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(kit: Kit) -> None:
    """Even with a valid ticket."""
    source = kit.side()
    ticket, _ = offered(source)
    code = (
        "import os, socket, sys, msgspec\n"
        "from baton.move.transport.source_client import OfferQuery\n"
        "from baton.move.transport.port import Ticket\n"
        "from baton.move.transport.wire import Verb, receive_answer\n"
        "ticket = msgspec.json.decode(sys.argv[1], type=Ticket)\n"
        "os.setuid(int(sys.argv[2]))\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.connect(chr(0) + ticket.address.partition('/')[2])\n"
        "connection.sendall(OfferQuery(ticket).packed(Verb.CHECK, 0))\n"
        "print(receive_answer(connection)[0].name)\n"
    )
    for user, answer in ((os.geteuid(), "VALID"), (65534, "OTHER_USER")):
        command = [sys.executable, "-c", code, msgspec.json.encode(ticket).decode(), str(user)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == answer


def test_a_source_that_is_asked_just_now_is_not_waited_for() -> None:
    """Adding a source checks whether others are gone. A source that hangs must not block that check."""
    asked, let_go = threading.Event(), threading.Event()

    def connect(_stall_s: float) -> socket.socket:
        asked.set()
        let_go.wait()
        raise ConnectionRefusedError

    asker = SourceClient("one that hangs", connect)
    refusals: list[str] = []

    def ask() -> None:
        try:
            asker.ask(OfferQuery(_unknown_ticket()), Verb.CHECK, _nothing)
        except TransferError as error:
            refusals.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    asked.wait()
    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.append(asker.close_if_gone()))
    looking.start()
    looking.join(20)
    waits = looking.is_alive()
    let_go.set()
    looking.join()
    asking.join()
    assert (waits, found) == (False, [False])
    assert ["does not answer" in refusal for refusal in refusals] == [True]
    assert asker.close_if_gone(), "the last question had no answer"


def _unknown_ticket() -> Ticket:
    return Ticket(transport="shm", address="", epoch=0, number=0, secret=bytes(SECRET_BYTES), extents=())


def _nothing(_connection: socket.socket) -> tuple[OfferStatus, int, None]:
    return OfferStatus.ENDED, 0, None
