"""HTTP servers that send something else, or end in the middle of an answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from baton.cli.ask_server import ask
from baton.core.errors import BatonError, StoreError
from baton.move.etcd import Etcd, EtcdError
from baton.move.ipc.connections import ConnectionServer
from baton.move.store.mooncake_store import MooncakePlace, MooncakeStore
from baton.serve.host.join_request import JoinFailedError, request_terms


@pytest.fixture(
    params=[b"garbage\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n01234"], ids=["garbage", "short"]
)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server with this answer to every request."""

    def answer(connection: socket.socket) -> None:
        with suppress(ConnectionError):
            connection.recv(10_000)
            connection.sendall(request.param)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(10_000):
                pass

    listening = socket.create_server(("127.0.0.1", 0))
    server = ConnectionServer(listening, answer, 4, full=answer)
    yield listening.getsockname()[1]
    server.close()


def test_a_broken_answer_of_etcd_is_an_etcd_error(port: int) -> None:
    """Another error would end `baton standby`, and with it the active server."""
    with pytest.raises(EtcdError, match="does not answer kv/range"):
        Etcd(f"http://127.0.0.1:{port}").get("key")


def test_a_broken_answer_of_a_mooncake_master_is_a_store_error(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error would end the thread that lists the blocks of other hosts."""
    monkeypatch.setattr(MooncakeStore, "_ask", lambda _: None)
    place = MooncakePlace(host="127.0.0.1", port=1, metrics_port=port)
    store = MooncakeStore(place, layout_fingerprint="", block_bytes=1)
    with pytest.raises(StoreError, match="does not list its keys"):
        store.held()
    store.close()


def test_a_broken_answer_of_a_server_is_a_failed_join(port: int) -> None:
    with pytest.raises(JoinFailedError, match="there is no server at"):
        request_terms(f"http://127.0.0.1:{port}", None)


_BROKEN_ERROR = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n"


@pytest.mark.parametrize("port", [_BROKEN_ERROR], indirect=True, ids=["error"])
def test_a_broken_body_of_an_error_keeps_its_status(port: int) -> None:
    """Another error would end `baton host`."""
    with pytest.raises(JoinFailedError, match="answers 503"):
        request_terms(f"http://127.0.0.1:{port}", None)
    with pytest.raises(BatonError, match="answers 503: Busy"):
        ask(f"http://127.0.0.1:{port}", "/cluster", None)


@pytest.mark.parametrize(
    "port", [b"HTTP/1.1 200 OK\r\n\r\n" + body for body in (b"[]", b"{}")], indirect=True, ids=["list", "empty"]
)
def test_an_answer_of_etcd_in_another_form_is_an_etcd_error(port: int) -> None:
    """Another error would end the thread that renews a standby's lease."""
    etcd = Etcd(f"http://127.0.0.1:{port}")
    with pytest.raises(EtcdError, match="lease/keepalive"):
        etcd.keep_alive("1")
    with pytest.raises(EtcdError, match="lease/grant"):
        etcd.grant(6)
