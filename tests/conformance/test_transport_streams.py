"""What can happen to a stream between two hosts: broken, damaged, hostile."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from baton.core.errors import TransferError
from baton.move.transport.tcp import TcpTransport
from baton.move.transport.tcp_peer import TcpLimits
from tests.transfers.kits import Kit, assert_quiet, kit_of, offered
from tests.transfers.wires import Gate

SIZE_BYTES = 1 << 20


@pytest.fixture(params=["tcp", "tcp staged"])
def tcp(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kit_of(request.param) as made:
        yield made


@pytest.fixture
def encrypted() -> Iterator[Kit]:
    with kit_of("tcp encrypted") as made:
        yield made


def test_a_bit_that_flips_in_encrypted_bytes_ends_the_connection(encrypted: Kit) -> None:
    """Even without a checksum: TLS notices it, and the piece is pulled again over another connection."""
    flips = [70_000]

    def flip(start: int, data: bytearray) -> None:
        if flips and start <= flips[0] < start + len(data):
            data[flips.pop() - start] ^= 16

    source, target = encrypted.side(8 * SIZE_BYTES), encrypted.side(8 * SIZE_BYTES)
    ticket, content = offered(source)
    proxy, through = encrypted.proxied(ticket, alter=flip)
    assert target.transport.pull(through, target.whole()).wait(60) == 8 * SIZE_BYTES
    assert not flips
    assert proxy.connections > TcpLimits().streams
    assert target.content() == content


def test_a_broken_stream_is_resumed(tcp: Kit) -> None:
    """Every connection is cut in the middle, twice: only pieces without a trailer are sent again."""
    gate = Gate(300_000)
    source, target = tcp.side(8 * SIZE_BYTES), tcp.side(8 * SIZE_BYTES)
    ticket, content = offered(source, checksum=True)
    proxy, through = tcp.proxied(ticket, gate=gate)
    pull = target.transport.pull(through, target.whole())
    gate.wait_until_reached()
    made = proxy.connections
    proxy.cut()
    gate.open()
    assert pull.wait(60) == 8 * SIZE_BYTES
    assert proxy.connections > made
    assert target.content() == content


@pytest.mark.parametrize("position", [100, 70_000, 3 * SIZE_BYTES])
def test_a_bit_that_flips_on_the_way_is_noticed(tcp: Kit, position: int) -> None:
    """With a checksum: the bytes are refused, and nothing is written afterwards."""

    def flip(start: int, data: bytearray) -> None:
        if start <= position < start + len(data):
            data[position - start] ^= 16

    source, target = tcp.side(8 * SIZE_BYTES), tcp.side(8 * SIZE_BYTES)
    ticket, _ = offered(source, checksum=True)
    _, through = tcp.proxied(ticket, alter=flip)
    with pytest.raises(TransferError, match="damaged"):
        target.transport.pull(through, target.whole()).wait(60)
    assert_quiet(source, target, Gate(0))


def test_nobody_there_is_an_error(tcp: Kit) -> None:
    source, target = tcp.side(), tcp.side()
    ticket, _ = offered(source)
    source.transport.close()
    with pytest.raises(TransferError, match="broke 5 times"):
        target.transport.pull(ticket, target.whole()).wait(60)
    with pytest.raises(TransferError, match="address"):
        target.transport.pull(msgspec.structs.replace(ticket, address="nowhere"), target.whole())


def test_an_address_that_is_no_name_is_an_error_every_time(tcp: Kit) -> None:
    """Python raises no OSError for it. Repeated more often than there are streams, so that none may die."""
    source, target = tcp.side(), tcp.side()
    ticket, _ = offered(source)
    wrong = msgspec.structs.replace(ticket, address="a..b:1")
    for _ in range(6):
        with pytest.raises(TransferError, match="broke 5 times"):
            target.transport.pull(wrong, target.whole()).wait(60)


def test_without_a_thread_that_receives_a_pull_fails_and_the_next_one_may_go(
    tcp: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tcp.side(), tcp.side()
    ticket, content = offered(source)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "baton-pull":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferError, match="no thread can be started"):
            target.transport.pull(ticket, target.whole()).wait(60)
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content


def test_hostile_bytes_do_not_end_the_listener(tcp: Kit) -> None:
    """Random bytes, and requests with random fields: the connection ends, and others are served."""
    source, target = tcp.side(), tcp.side()
    ticket, content = offered(source)
    host, port = ticket.address.split(":")
    rng = random.Random(8)
    for round_number in range(60):
        with socket.create_connection((host, int(port)), 30) as connection:
            noise = rng.randbytes(rng.choice([1, 63, 64, 65, 4096]))
            if round_number % 2:
                noise = b"bKV1\x01\0\0\0" + rng.randbytes(56)
            try:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                assert len(connection.recv(1 << 16)) <= 64
            except OSError:  # hung up on while we talk
                continue
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content


@pytest.mark.parametrize("how", ["withdraw", "expire"])
def test_an_offer_that_ends_under_the_last_piece_fails_the_pull(tcp: Kit, how: str) -> None:
    """When every byte has been requested already, only the trailer reports it."""
    now = [0.0]
    source, gate = tcp.side(32 * SIZE_BYTES, now_s=lambda: now[0]), Gate(200_000)
    target = tcp.side(32 * SIZE_BYTES)
    whole = TcpTransport("127.0.0.1:0", limits=TcpLimits(piece_bytes=32 * SIZE_BYTES), source=target.source)
    tcp.opened.callback(whole.close)
    source.fill(1)
    ticket = source.transport.offer(source.whole(), lease_s=5.0)
    pull = whole.pull(tcp.through(ticket, gate), target.whole())
    gate.wait_until_reached()
    if how == "withdraw":
        source.transport.withdraw(ticket)
    now[0] = 5.0
    source.arena.memory[:] = bytes(32 * SIZE_BYTES)
    gate.open()
    with pytest.raises(TransferError, match="ended the offer during the pull"):
        pull.wait(60)


def test_connections_are_limited(tcp: Kit) -> None:
    """One connection beyond the limit is refused, and is served once another one ends."""
    source, target = tcp.side(), tcp.side()
    narrow = TcpTransport("127.0.0.1:0", limits=TcpLimits(connections_max=2), source=source.source)
    tcp.opened.callback(narrow.close)
    content = source.fill(1)
    ticket = narrow.offer(source.whole(), lease_s=600.0)
    host, port = ticket.address.split(":")
    others = [socket.create_connection((host, int(port))) for _ in range(2)]
    with pytest.raises(TransferError, match="connections_max"):
        target.transport.pull(ticket, target.whole()).wait(60)
    for each in others:
        each.shutdown(socket.SHUT_WR)
        assert each.recv(1) == b""  # the source has ended the connection
        each.close()
    target.transport.pull(ticket, target.whole()).wait(60)
    assert target.content() == content
