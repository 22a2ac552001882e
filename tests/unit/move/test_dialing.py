"""Connections by name: the limit of a caller includes a resolver that hangs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from baton.move.ipc.dialing import Dialer
from baton.move.store.node import StoreNode
from baton.move.store.node_store import NodeStore
from tests.stores import BLOCK_BYTES, get, names, put

NAME = "kv.example"


@dataclass
class SlowResolver:
    """A resolver that answers for `NAME` only while it is open."""

    calls: int = 0
    open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *given: object, **named: object) -> list:
        if host == NAME:
            self.calls += 1
            self.open.wait()
            host = "127.0.0.1"
        return self._real(host, port, *given, **named)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowResolver]:
    made = SlowResolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.open.set()


def test_a_name_that_is_not_resolved_in_time_is_given_up_and_asked_for_once(resolver: SlowResolver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialer = Dialer(NAME, listening.getsockname()[1])
        for _ in range(3):
            with pytest.raises(TimeoutError, match=rf"{NAME} was not resolved within 0\.01 s"):
                dialer.connect(0.01)
        assert resolver.calls == 1
        resolver.open.set()
        with dialer.connect(30.0) as connection:
            assert connection.getpeername() == listening.getsockname()


def test_addresses_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name has two; nothing listens at the first."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, real = listening.getsockname()[1], socket.getaddrinfo

        def answer(host: str, port: int, *given: object, **named: object) -> list:
            hosts = ["127.0.0.2", "127.0.0.1"] if host == NAME else [host]
            return [found for each in hosts for found in real(each, port, *given, **named)]

        monkeypatch.setattr(socket, "getaddrinfo", answer)
        with Dialer(NAME, port).connect(30.0) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, limits_s = [0.0], list[float]()

    def connect(address: tuple[str, int], limit_s: float) -> socket.socket:
        limits_s.append(limit_s)
        clock_s[0] += limit_s
        raise TimeoutError(f"{address[0]} does not answer")

    def answer(host: str, port: int, *given: object, **named: object) -> list:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr("baton.move.ipc.dialing.now_s", lambda: clock_s[0])
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "getaddrinfo", answer)
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1 does not answer"):
        Dialer(NAME, 80).connect(30.0)
    assert limits_s == [15.0, 15.0]


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "no such host", "x.invalid"])
def test_a_name_without_an_address_is_an_error_of_the_network(name: str) -> None:
    with pytest.raises(OSError, match=r".+"):
        Dialer(name, 80).connect(30.0)


def test_a_store_whose_name_is_not_resolved_misses_and_closes(
    resolver: SlowResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read waits for the resolver, and the store closes meanwhile."""
    resolver.open.set()
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    port = int(node.address.rpartition(":")[2])
    store = NodeStore((NAME, port), layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)
    try:
        assert put(store, names(2), BLOCK_BYTES) == [True] * 2
        monkeypatch.setattr("baton.move.store.node_link.CONNECT_TIMEOUT_S", 0.01)
        resolver.open.clear()
        node.close()
        assert get(store, names(2), BLOCK_BYTES) == [False] * 2
        assert not store.counters.reachable
    finally:
        store.close()
