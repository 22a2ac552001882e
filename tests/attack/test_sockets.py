"""Attacks without a key over raw sockets, at the size at which they ended a server or held its memory."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from baton.move.ipc.frames import ControlWriter
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.node_wire import HELLO, MAGIC
from tests.attack.conftest import (
    HEAD,
    KEPT_BYTES,
    KEPT_RATIO,
    RunningServer,
    check_alive,
    connections,
    memory_bytes,
    read_all,
    send,
    unharmed,
    warm_up,
)
from tests.attack.refusals import statuses
from tests.hosting import cluster
from tests.serving import serving
from tests.store_servers import baton_pool
from tests.stores import BLOCK_BYTES, get, names, open_pool, put

CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]


def test_headers_without_end(target: RunningServer, control: RunningServer) -> None:
    """Eight connections took 1.9 GB in 3 s."""
    piece = b"a" * (1 << 20)
    with unharmed(target, control), connections(target, 8, HEAD + b"x: ") as attackers:
        for _ in range(64):
            with ThreadPoolExecutor(8) as pool:
                if not any(pool.map(lambda attacker: send(attacker, piece), attackers)):
                    break
        else:
            raise AssertionError("64 MiB of a header were taken")


def test_many_connections(target: RunningServer, control: RunningServer) -> None:
    """2,000 half-sent requests of one address: 1,024 wait for their time, the others are refused at once."""
    with unharmed(target, control), connections(target, 2000, HEAD) as attackers:
        check = statuses([read_all(attacker) for attacker in attackers])
    assert check["408"] + check["429"] + check[""] == 2000, check
    assert check["408"] <= 1024
    assert check["429"] > 0


def test_unfinished_bodies(target: RunningServer, control: RunningServer) -> None:
    """250 bodies of 4 MiB without their last byte held 900 MB. A client's budget is 64 MiB."""
    length = 4 * 1024 * 1024
    head = HEAD + b"Content-Length: %d\r\n\r\n" % length
    before = memory_bytes(target.process.pid)
    with unharmed(target, control), connections(target, 250, head) as attackers:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda attacker: send(attacker, b"x" * (length - 1)), attackers))
        held = memory_bytes(target.process.pid) - before
        answers = statuses([read_all(attacker) for attacker in attackers])
    assert held < 3 * 64 * 1024 * 1024, f"{held >> 20} MiB are held"
    assert answers["429"] + answers["408"] + answers[""] == 250, answers
    assert answers["429"] > 0


@pytest.mark.parametrize("lists", [2500, 10_000])
def test_many_odd_bodies_at_once(target: RunningServer, control: RunningServer, lists: int) -> None:
    """400 bodies are complete at the same moment: of 15 KB, parsed on the event loop, or of 60 KB, in a thread."""
    odd = b'{"prompt":[' + b",".join([b"[1.0]"] * lists) + b"]}"
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(odd)
    with unharmed(target, control), connections(target, 400, head) as attackers:
        assert all(send(attacker, odd[:-1]) for attacker in attackers)
        assert all(send(attacker, odd[-1:]) for attacker in attackers)
        assert statuses([read_all(attacker) for attacker in attackers]) == {"400": 400}


def test_tiny_chunks_on_many_connections(target: RunningServer, control: RunningServer) -> None:
    """400 connections with 40,000 chunks of a byte each stopped all streams for 8.6 s, with any key or none."""
    chunks = b"1\r\n \r\n" * 40_000
    with unharmed(target, control), connections(target, 400, HEAD + CHUNKED) as attackers:
        for attacker in attackers:
            attacker.setblocking(False)
            attacker.send(chunks)
        for attacker in attackers:
            attacker.settimeout(120)
        assert statuses([read_all(attacker) for attacker in attackers]) == {"408": 400}


@pytest.mark.parametrize("path", ["/metrics", "/openapi.json", "/cluster"])
def test_many_requests_for_a_page_at_once(target: RunningServer, control: RunningServer, path: str) -> None:
    """300 requests for /metrics at once stopped all streams for 3.3 s."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with unharmed(target, control), connections(target, 300, b"") as attackers:
        assert all(send(attacker, request) for attacker in attackers)
        assert statuses([read_all(attacker) for attacker in attackers]) == {"200": 300}


def test_slow_writers(target: RunningServer, control: RunningServer) -> None:
    """A byte now and then keeps no connection: the time is that of all headers, not of a pause."""
    with unharmed(target, control), connections(target, 200, HEAD) as attackers:
        left = list(attackers)
        while left:
            left = [attacker for attacker in left if send(attacker, b"x")]
        assert statuses([read_all(attacker) for attacker in attackers])["200"] == 0


def test_slow_readers(target: RunningServer, control: RunningServer) -> None:
    """8 streams that their clients do not read are cut, and their requests cancelled; another client's answer is whole.

    Their 56 choices leave room in the batch of the decode worker (64) for the other client.
    """
    choices = {"n": 7, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": "a", **choices}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    refused = ("baton_http_refusals_total", 'reason="slow_reader"')
    before = target.metric(*refused)
    with unharmed(target, control), connections(target, 8, request, receive_bytes=4096) as attackers:
        while target.metric(*refused) < before + len(attackers):
            pass  # each round is a request served; one that read before the cut would be no slow reader
        assert all(b"[DONE]" not in read_all(attacker) for attacker in attackers)


def random_bytes(address: tuple[str, int], *, rounds: int, first: bytes = b"") -> None:
    """Send random bytes, alone and as the content of a frame with its right length, and close at any moment.

    `first`: sent on every second connection before them.
    """
    draw = random.Random(address[1])
    for number in range(rounds):
        with socket.create_connection(address, timeout=10) as connection:
            send(connection, first * (number % 2))
            for _ in range(draw.randrange(1, 4)):
                data = draw.randbytes(draw.choice((1, 4, 100, 5000, 70_000)))
                if not send(connection, ControlWriter().frame(data) if draw.random() < 0.3 else data):
                    break


def test_random_bytes_at_the_http_port(target: RunningServer, control: RunningServer) -> None:
    with unharmed(target, control):
        random_bytes(("127.0.0.1", int(target.url.rsplit(":", 1)[1])), rounds=300)


def test_random_bytes_at_the_ports_for_hosts_and_movers(target: RunningServer, control: RunningServer) -> None:
    """Asking to join opens the port for hosts; the first connection there starts no mover, a host does."""
    with target.client() as client:
        port = client.post("/cluster/hosts", json={}).raise_for_status().json()["port"]
    with unharmed(target, control):
        random_bytes(("127.0.0.1", port), rounds=300)


def test_random_bytes_at_the_admin_port(control: RunningServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with serving("hash", "--admin-port", str(port)) as server:
        check_alive(server)
        with unharmed(server, control):
            random_bytes(("127.0.0.1", port), rounds=300)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            role = {"role": "prefill"}
            assert client.post(f"/cluster/workers/{worker_of(server)}/role", json=role).status_code == 200
        with server.client() as client:
            assert client.post(f"/cluster/workers/{worker_of(server)}/role", json=role).status_code == 403


def worker_of(server: RunningServer) -> str:
    return server.cluster()["workers"][0]["id"]


def test_random_bytes_at_a_pool_node() -> None:
    """Its blocks stay, and it reads and writes them for another client meanwhile."""
    with baton_pool() as (node, url):
        store = open_pool(url)
        assert put(store, names(5), BLOCK_BYTES) == [True] * 5
        before = memory_bytes(node.pid)
        host, port = url.removeprefix("pool://").split(":")
        for _ in range(30):
            hello = HELLO.pack(MAGIC, fingerprint_digest("a layout"), BLOCK_BYTES)
            random_bytes((host, int(port)), rounds=10, first=hello)
            assert get(store, names(5), BLOCK_BYTES) == [True] * 5
        assert node.poll() is None
        assert memory_bytes(node.pid) <= before * (1 + KEPT_RATIO) + KEPT_BYTES
        store.close()


def test_random_bytes_at_the_ports_of_movers(control: RunningServer) -> None:
    """KV still moves between the hosts, and the text of a stream stays the same."""
    hosts = {"a": ["--prefill", "1"], "b": ["--decode", "1"]}
    with cluster("hash", hosts) as (server, joined):
        warm_up(server)
        pids = [host.process.pid for host in joined.values()]
        with unharmed(server, control, *pids):
            for host in server.cluster()["hosts"]:
                name, port = host["address"].rsplit(":", 1)
                random_bytes((name, int(port)), rounds=300)
        assert [host.process.poll() for host in joined.values()] == [None] * len(joined)
