"""`baton pool`: other layouts, clients that end in the middle of a block, death of the node, damaged bytes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.core.errors import StoreError
from baton.move.ipc.connections import send_views
from baton.move.store import node as module
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.node import StoreNode
from baton.move.store.node_store import NodeStore
from baton.move.store.node_wire import (
    ANSWER,
    HELLO,
    MAGIC,
    PUT,
    REQUEST,
    receive,
)
from tests.store_servers import baton_pool
from tests.stores import BLOCK_BYTES, ask_until_reachable, get, names, open_pool, put


def test_a_node_that_is_killed_is_a_miss_and_comes_back() -> None:
    with baton_pool() as (_, url):
        ours, theirs = open_pool(url), open_pool(url)
        assert put(ours, names(5), BLOCK_BYTES) == [True] * 5
        assert get(theirs, names(5), BLOCK_BYTES) == [True] * 5
    for store in (ours, theirs):
        assert get(store, names(5), BLOCK_BYTES) == [False] * 5
        assert put(store, names(1), BLOCK_BYTES) == [False]
        assert not store.counters.reachable
    with pytest.raises(StoreError, match="does not list"):
        ours.held()
    with pytest.raises(StoreError, match="start it with baton pool"):
        open_pool(url)
    with baton_pool(port=int(url.rpartition(":")[2])):
        ask_until_reachable(ours)
        assert get(ours, names(5), BLOCK_BYTES) == [False] * 5
        assert put(ours, names(5), BLOCK_BYTES) == [True] * 5
        assert get(ours, names(5), BLOCK_BYTES) == [True] * 5
        ours.close()
        theirs.close()


def test_a_node_that_is_stopped_delays_no_caller_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are misses until it answers again."""
    monkeypatch.setattr("baton.move.store.node_link.ANSWER_TIMEOUT_S", 1.0)
    with baton_pool() as (node, url):
        store = open_pool(url)
        put(store, names(5), BLOCK_BYTES)
        node.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.pid, os.WSTOPPED)
        assert get(store, names(5), BLOCK_BYTES) == [False] * 5
        assert put(store, names(1, first=50), BLOCK_BYTES) == [False]
        assert not store.counters.reachable
        node.send_signal(signal.SIGCONT)
        ask_until_reachable(store)
        assert get(store, names(5), BLOCK_BYTES) == [True] * 5
        store.close()


def test_a_signal_ends_the_command_in_order() -> None:
    with baton_pool() as (node, url):
        store = open_pool(url)
        put(store, names(1), BLOCK_BYTES)
        node.send_signal(signal.SIGTERM)
        assert node.wait() == 0
        store.close()


@pytest.mark.parametrize("arguments", [["--bytes", "0"], ["--bytes", "1e6", "--port", "70000"]])
def test_bad_arguments_are_told(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "baton.cli.main", "pool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give 1 to" in done.stderr
    assert "a port from 0 to 65535" in done.stderr


@pytest.mark.parametrize(("fingerprint", "block_bytes"), [("another", BLOCK_BYTES), ("a layout", 50_000)])
def test_another_layout_is_refused(node: StoreNode, fingerprint: str, block_bytes: int) -> None:
    store = open_pool(f"pool://{node.address}")
    with pytest.raises(StoreError, match=f"{BLOCK_BYTES} bytes each, ours have {block_bytes}"):
        open_pool(f"pool://{node.address}", fingerprint=fingerprint, block_bytes=block_bytes)
    store.close()


def test_however_small_the_first_blocks_are_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first client sets the block size: a node of 100 GB must not create slots of one byte."""
    monkeypatch.setattr(module, "SLOTS_MAX", 3)
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    store = open_pool(f"pool://{node.address}")
    put(store, names(5), BLOCK_BYTES)
    assert len(store.held()) == 3
    store.close()
    node.close()


def _dial(node: StoreNode) -> socket.socket:
    host, port = node.address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=60)
    send_views(connection, [HELLO.pack(MAGIC, fingerprint_digest("a layout"), BLOCK_BYTES)])
    receive(connection, ANSWER.size)
    return connection


def test_a_client_that_ends_in_the_middle_of_a_block_leaves_nothing(node: StoreNode) -> None:
    """Its blocks are not stored and their slots are free again: ten blocks fit into ten slots."""
    store = open_pool(f"pool://{node.address}")
    half = names(10, first=100)
    with _dial(node) as connection:
        send_views(connection, [REQUEST.pack(PUT, 10), *half])
        assert receive(connection, 10) == bytes([1] * 10)
        send_views(connection, [bytes(16), bytes(BLOCK_BYTES), bytes(16), bytes(100)])
    for _ in range(1000):  # the node's thread notices in its own time
        if put(store, names(10), BLOCK_BYTES) == [True] * 10:
            break
    assert get(store, names(10), BLOCK_BYTES) == [True] * 10
    assert get(store, half, BLOCK_BYTES) == [False] * 10
    store.close()


def test_a_node_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that accepts the connection and hangs is an error at the opening."""
    monkeypatch.setattr("baton.move.store.node_link.ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreError, match="no bytes came in time"):
        open_pool(f"pool://127.0.0.1:{silent.getsockname()[1]}")


def test_what_is_no_request_ends_the_connection_only(node: StoreNode) -> None:
    store = open_pool(f"pool://{node.address}")
    put(store, names(2), BLOCK_BYTES)
    for nonsense in (REQUEST.pack(b"x", 0), REQUEST.pack(PUT, 1 << 31)):
        with _dial(node) as connection:
            send_views(connection, [nonsense])
            assert connection.recv(1) == b""
    assert get(store, names(2), BLOCK_BYTES) == [True, True]
    store.close()


def test_bytes_that_changed_on_the_way_are_a_miss(node: StoreNode) -> None:
    """The client that puts a block computes its checksum, and the client that gets it compares."""
    store = open_pool(f"pool://{node.address}")
    assert isinstance(store, NodeStore)
    with _dial(node) as connection:
        send_views(connection, [REQUEST.pack(PUT, 1), *names(1)])
        receive(connection, 1)
        send_views(connection, [bytes(16), bytes(BLOCK_BYTES)])
        assert receive(connection, 1) == b"\1"
    assert get(store, names(1), BLOCK_BYTES) == [False]
    assert (store.counters.damaged, store.held()) == (1, [])
    assert put(store, names(1), BLOCK_BYTES) == [True]
    assert get(store, names(1), BLOCK_BYTES) == [True]
    store.close()


def test_a_node_that_had_no_descriptor_left_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")] * 4

    def accept_later(listening: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    store = open_pool(f"pool://{node.address}")
    assert put(store, names(1), BLOCK_BYTES) == [True]
    assert not failures
    store.close()
    node.close()


def test_a_node_that_hangs_up_may_be_of_another_version() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        hung_up = threads.submit(lambda: listening.accept()[0].close())
        with pytest.raises(StoreError, match="or it is of another version of Baton"):
            open_pool(f"pool://127.0.0.1:{listening.getsockname()[1]}")
        hung_up.result()
