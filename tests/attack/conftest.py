"""A server with the limits of production and short times, that all attacks share: each must leave it as it was."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.attack.odd_bodies import TYPE, bodies, send_by_all
from tests.attack.watch import Watch
from tests.serving import RunningServer, serving

TIMES = """
[limits]
header_s = 10.0
body_s = 10.0
idle_s = 10.0
send_s = 5.0

[sandbox]
wall_s = 120.0
"""
"""Short times for clients. The CPU time of sandboxes decides, however busy the machine is."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
KEPT_RATIO, KEPT_BYTES = 0.1, 8 << 20
"""Memory that the allocator may keep after an attack: a share of the start, and its own free lists."""
ASKED_MAX = 2000
"""Requests that are served at most while the memory of an attack is returned. That takes the server 10 s, with the idle
times of sandboxes and of its heap."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = tmp_path_factory.mktemp("attack") / "baton.toml"
    config.write_text(TIMES)
    with serving("hash", "--config", str(config)) as server:
        warm_up(server)
        fill_allocator(server)
        before = memory_bytes(server.process.pid)
        yield server
        check_memory(server, before, server.process.pid)


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


def warm_up(server: RunningServer) -> None:
    """Let the server start its sandboxes and fill its pools of buffers: that is no leak."""
    body = {"prompt": "a" * 2000, "n": 8, "max_tokens": 40, "ignore_eos": True, "logprobs": 5}
    with server.client() as client:
        client.post("/v1/completions", json=body).raise_for_status()
        grammar = {"prompt": "a", "max_tokens": 9, "guided_regex": "[a-c]{4}"}
        client.post("/v1/completions", json=grammar).raise_for_status()


def fill_allocator(server: RunningServer) -> None:
    """Send each large body once: growth is what the second time adds.

    Python's allocator returns an arena of 1 MiB to the system only once it is empty. Large bodies leave arenas nearly
    empty, at most as many as they use at their peak: 28 arenas before, 73 after the first round, 86 after the second,
    while the objects in use stay at 27.5 MB (sys._debugmallocstats). All processes: 159, 204 and 218 MiB.
    """
    for path in ("/v1/completions", "/v1/chat/completions"):
        for _, body in bodies(path):
            send_by_all(server.url + path, body.encode(), TYPE)


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started: workers, sandboxes, movers."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, listed.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def memory_bytes(*pids: int) -> int:
    """Return the memory of processes and all that they have started, without shared memory such as an arena."""
    total = 0
    for pid in [one for first in pids for one in descendants(first)]:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("Pss_Anon:")[1].split()[0]) << 10
    return total


def check_memory(server: RunningServer, before: int, *pids: int) -> None:
    """Fail unless processes use about as many bytes as before, once the server knows that the connections are gone."""
    most = before * (1 + KEPT_RATIO) + KEPT_BYTES
    for _ in range(ASKED_MAX):
        if memory_bytes(*pids) <= most:
            return
        check_alive(server)
    raise AssertionError(f"{before >> 20} MiB before, {memory_bytes(*pids) >> 20} MiB after")


def share_priority(server: RunningServer, control: RunningServer) -> None:
    """Give all processes of both servers the lower of their priorities: they must get the same share of a busy machine.

    A machine may lower the priority of a long run, and then only processes that start later have the lower one.
    """
    lowest = max(os.getpriority(os.PRIO_PROCESS, each.process.pid) for each in (server, control))
    for pid in [pid for each in (server, control) for pid in descendants(each.process.pid)]:
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, pid, lowest)


def requests_in(server: RunningServer) -> int:
    """Return the number of requests that the workers have. One may be of the other client."""
    return sum(worker["running"] + worker["waiting"] for worker in server.cluster()["workers"])


@contextmanager
def unharmed(server: RunningServer, control: RunningServer, *others: int) -> Iterator[None]:
    """During the block another client's streams go on. After it the server answers, no request is left, and its
    workers and its memory are as they were. `others`: further processes whose memory counts, such as hosts."""
    check_alive(server)
    share_priority(server, control)
    before, pids = memory_bytes(server.process.pid, *others), server.worker_pids()
    with Watch(server, control) as watch:
        yield
    watch.check()
    while requests_in(server):
        pass  # each round is a request served; the test's timeout bounds it
    check_alive(server)
    assert server.worker_pids() == pids, server.output()
    check_memory(server, before, server.process.pid, *others)


@contextmanager
def connections(
    server: RunningServer, count: int, first: bytes, *, receive_bytes: int = 0
) -> Iterator[list[socket.socket]]:
    """Open connections that have each sent the first bytes. Those that the server refused are among them.

    `receive_bytes`: size of their receive buffers. 0: the system's, which holds megabytes.
    """
    address = (server.url.split("//")[1].split(":")[0], int(server.url.rsplit(":", 1)[1]))
    with ExitStack() as stack:
        opened: list[socket.socket] = []
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(30)
            if receive_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.connect(address)
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
