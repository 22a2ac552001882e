"""A server with the limits of production and short times, that all attacks share: each must leave it as it was."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.attack.watch import Watch
from tests.serving import RunningServer, serving

TIMES = """
[limits]
header_s = 3.0
body_s = 3.0
idle_s = 10.0
send_s = 3.0
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEPT_RATIO, KEPT_BYTES = 0.1, 8 << 20
"""Memory that the allocator may keep after an attack: a share of the start, and its own free lists."""
ASKED_MAX = 500
"""Requests that are served at most while the memory of an attack is returned."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("attack") / "baton.toml"
    config.write_text(TIMES)
    with serving("hash", "--config", str(config)) as server:
        check_alive(server)
        yield server
        assert server.process.poll() is None, server.output()


@pytest.fixture(scope="session")
def control() -> Iterator[RunningServer]:
    """A server that nothing attacks: its streams show what the machine does to those of the target."""
    with serving("hash") as server:
        yield server


def check_alive(server: RunningServer) -> None:
    """The server answers, on a new connection as on any other."""
    with server.client() as client:
        body = {"prompt": "are you there?", "max_tokens": 3}
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200, server.output()


def memory_bytes(server: RunningServer) -> int:
    """Return the memory of the server process, without its workers and what it shares with them."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def requests_in(server: RunningServer) -> int:
    """Return the number of requests that the workers have. One may be of the other client."""
    return sum(worker["running"] + worker["waiting"] for worker in server.cluster()["workers"])


@contextmanager
def unharmed(server: RunningServer, control: RunningServer) -> Iterator[None]:
    """During the block another client's streams go on. After it the server answers, no request is left, and its
    workers and its memory are as they were."""
    check_alive(server)
    before, pids = memory_bytes(server), server.worker_pids()
    with Watch(server, control) as watch:
        yield
    watch.check()
    while requests_in(server):
        pass  # each round is a request served; the test's timeout bounds it
    check_alive(server)
    assert server.worker_pids() == pids, server.output()
    most = before * (1 + KEPT_RATIO) + KEPT_BYTES
    for _ in range(ASKED_MAX):  # the server returns memory once it has seen that the connections are gone
        if memory_bytes(server) <= most:
            return
        check_alive(server)
    raise AssertionError(f"{before >> 20} MiB before, {memory_bytes(server) >> 20} MiB after")


@contextmanager
def connections(server: RunningServer, count: int, first: bytes) -> Iterator[list[socket.socket]]:
    """Open connections that have each sent the first bytes. Those that the server refused are among them."""
    address = (server.url.split("//")[1].split(":")[0], int(server.url.rsplit(":", 1)[1]))
    with ExitStack() as stack:
        opened: list[socket.socket] = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(address, timeout=30))
            opened.append(connection)
            send(connection, first)
        yield opened


def send(connection: socket.socket, data: bytes) -> bool:
    """Send data. Return False once the server has closed the connection."""
    try:
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)
