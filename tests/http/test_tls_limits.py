"""Limits of TLS connections before their handshake is done, which no HTTP protocol object sees."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from baton.core.limits import LimitsConfig
from baton.move.ipc.tls import ServerTls
from tests.http.conftest import Server, build_house
from tests.process.test_tls import write_certificate

LIMITS = LimitsConfig(header_s=0.4, connections_max=24, address_connections_max=4)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ServerTls:
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    write_certificate(cert, key)
    return ServerTls(cert, key)


@pytest.fixture(scope="module")
def server(certificate: ServerTls) -> Iterator[Server]:
    with Server(build_house(limits=LIMITS), tls=certificate) as running:
        yield running


@pytest.fixture(scope="module")
def patient_server(certificate: ServerTls) -> Iterator[Server]:
    """A server that leaves silent connections open for longer than a test takes on a busy machine."""
    limits = msgspec.structs.replace(LIMITS, header_s=60.0, idle_s=60.0)
    with Server(build_house(limits=limits), tls=certificate) as running:
        yield running


def _connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def _unchecked() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_requests_are_answered_on_one_connection(patient_server: Server) -> None:
    url = f"https://127.0.0.1:{patient_server.port}"
    with httpx.Client(base_url=url, verify=_unchecked(), timeout=60) as client:
        for _ in range(3):
            assert client.get("/health").status_code == 200


def test_a_handshake_that_never_begins_ends_at_the_deadline(server: Server) -> None:
    with _connect(server) as silent:
        assert silent.recv(1) == b""


def test_a_client_without_tls_is_disconnected(server: Server) -> None:
    with _connect(server) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in b"".join(iter(lambda: plain.recv(4096), b""))


def test_connections_count_before_their_handshake(patient_server: Server) -> None:
    silent = [_connect(patient_server) for _ in range(4)]
    try:
        with _connect(patient_server) as late, _unchecked().wrap_socket(late) as secured:
            assert secured.recv(4096).startswith(b"HTTP/1.1 429 ")
    finally:
        for connection in silent:
            connection.close()
