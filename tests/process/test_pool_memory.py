"""A pool node lends its memory to processes of its own machine and user."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.core.errors import StoreError
from baton.move.ipc.connections import send_views
from baton.move.ipc.shared_memory import bind_in_folder, boot_id, machine_id, map_sealed
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.node import StoreNode
from baton.move.store.node_link import NodeDialer
from baton.move.store.node_store import NodeStore
from baton.move.store.node_wire import ANSWER, DONE, GET, HELLO, MAGIC, PLACE, PUT, REQUEST, receive
from tests.command_line import baton
from tests.stores import BLOCK_BYTES, get, names, open_pool, put

SMALL_BYTES, SLOTS = 1000, 256


@dataclass
class _Borrower:
    """A client on the node's machine that speaks the wire format by hand."""

    connection: socket.socket
    memory: memoryview

    def slots(self, count: int) -> list[memoryview]:
        """Receive the slots of blocks."""
        places = PLACE.iter_unpack(receive(self.connection, count * PLACE.size))
        return [self.memory[offset : offset + BLOCK_BYTES] for _, offset in places]


@contextmanager
def _borrowing(node: StoreNode, block_bytes: int = BLOCK_BYTES) -> Iterator[_Borrower]:
    hello = HELLO.pack(MAGIC, fingerprint_digest("a layout"), block_bytes)
    host, port = node.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as far:
        send_views(far, [hello])
        name = ANSWER.unpack(receive(far, ANSWER.size))[-1].rstrip(b"\0").decode().partition("/")[2]
    with socket.socket(socket.AF_UNIX) as near:
        near.connect("\0" + name)
        send_views(near, [hello])
        _, (descriptor,), _, _ = socket.recv_fds(near, ANSWER.size, 1)
        memory = map_sealed(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)
        yield _Borrower(near, memory)


def test_on_the_nodes_machine_its_memory_is_lent(node: StoreNode) -> None:
    """No block goes through a socket then, except with `via=tcp`. Both clients find each other's blocks."""
    near, far = open_pool(f"pool://{node.address}"), open_pool(f"pool://{node.address}?via=tcp")
    assert isinstance(near, NodeStore)
    assert isinstance(far, NodeStore)
    assert (near.is_near, far.is_near) == (True, False)
    put(near, names(2), BLOCK_BYTES)
    put(far, names(2, first=5), BLOCK_BYTES)
    both = [*names(2), *names(2, first=5)]
    assert get(near, both, BLOCK_BYTES) == get(far, both, BLOCK_BYTES) == [True] * 4
    near.close()
    far.close()


def test_a_folder_lends_the_memory_beyond_the_network_namespace(tmp_path: Path) -> None:
    """A client in a namespace of its own takes such an address for near, and an abstract socket's not."""
    (tmp_path / "baton-pool-0123").touch()
    left = bind_in_folder("baton-pool-left", tmp_path)
    left.close()
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES, socket_folder=tmp_path)
    store = open_pool(f"pool://{node.address}")
    assert isinstance(store, NodeStore)
    assert store.is_near
    assert put(store, names(2), BLOCK_BYTES) == get(store, names(2), BLOCK_BYTES) == [True] * 2
    store.close()
    (found,) = [each for each in tmp_path.iterdir() if each.is_socket()]
    ask = "import sys; from baton.move.ipc.shared_memory import shares_machine as near; print(*map(near, sys.argv[1:]))"
    addresses = [f"{boot_id()}/{found}", f"{machine_id()}/baton-pool-0123"]
    told = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", ask, *addresses], capture_output=True, text=True, check=False
    )
    node.close()
    assert not found.exists()
    if told.returncode:
        pytest.skip(f"no right to make a network namespace: {told.stderr.strip()[-200:]}")
    assert told.stdout.split() == ["True", "False"]


def test_a_folder_that_cannot_have_a_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another folder for the socket"):
        StoreNode(host="127.0.0.1", port=0, capacity_bytes=BLOCK_BYTES, socket_folder=tmp_path / "missing")
    done = baton("pool", "--bytes", "1e6", "--socket-folder", f"/{'long/' * 20}")
    assert done.returncode == 2
    assert "has 100 characters, but may have 60" in done.stderr


@pytest.fixture
def many() -> Iterator[StoreNode]:
    """A node of many small slots."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=SLOTS * SMALL_BYTES)
    yield node
    node.close()


def test_blocks_that_are_put_one_by_one_use_every_slot(many: StoreNode) -> None:
    """Blocks put after that evict the oldest ones."""
    store, wanted = open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES), names(SLOTS + 40)
    for name in wanted[:SLOTS]:
        assert put(store, [name], SMALL_BYTES) == [True]
    assert get(store, wanted[:SLOTS], SMALL_BYTES) == [True] * SLOTS
    for name in wanted[SLOTS:]:
        assert put(store, [name], SMALL_BYTES) == [True]
    assert store.held() == wanted[40:]
    assert get(store, wanted, SMALL_BYTES) == [False] * 40 + [True] * SLOTS
    assert (store.counters.put, store.counters.damaged) == (len(wanted), 0)
    store.close()


def test_a_block_that_is_there_already_counts_as_young_again(many: StoreNode) -> None:
    """And it is not copied a second time, whichever client has put it."""
    ours, theirs = (open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES) for _ in range(2))
    for store in (ours, theirs, ours, theirs):
        for name in names(5):
            assert put(store, [name], SMALL_BYTES) == [True]
    assert (ours.counters.put, theirs.counters.put) == (5, 0)
    assert put(ours, names(1), SMALL_BYTES) == [True]
    assert ours.held() == [*names(4, first=1), *names(1)]
    assert get(ours, names(5), SMALL_BYTES) == [True] * 5
    ours.close()
    theirs.close()


def test_an_evicted_block_is_a_miss_and_no_damage(node: StoreNode) -> None:
    """Its slot holds the bytes of another block."""
    near, far = open_pool(f"pool://{node.address}"), open_pool(f"pool://{node.address}?via=tcp")
    put(near, names(10), BLOCK_BYTES)
    put(far, names(10, first=50), BLOCK_BYTES)
    assert get(near, names(10), BLOCK_BYTES) == [False] * 10
    assert get(near, names(10, first=50), BLOCK_BYTES) == [True] * 10
    far.drop(names(5, first=50))
    assert get(near, names(10, first=50), BLOCK_BYTES) == [False] * 5 + [True] * 5
    assert near.counters.damaged == 0
    near.close()
    far.close()


def test_a_borrower_that_ends_in_the_middle_of_a_block_leaves_nothing(node: StoreNode) -> None:
    store, half = open_pool(f"pool://{node.address}"), names(10, first=100)
    with _borrowing(node) as borrower:
        send_views(borrower.connection, [REQUEST.pack(PUT, 10), *half])
        assert receive(borrower.connection, 10) == bytes([1] * 10)
        for slot in borrower.slots(10):
            slot[: BLOCK_BYTES // 2] = bytes(BLOCK_BYTES // 2)
    for _ in range(1000):  # the node's thread notices in its own time
        if put(store, names(10), BLOCK_BYTES) == [True] * 10:
            break
    assert get(store, names(10), BLOCK_BYTES) == [True] * 10
    assert get(store, half, BLOCK_BYTES) == [False] * 10
    store.close()


def test_what_is_being_read_is_not_given_away(node: StoreNode) -> None:
    """Until the client is done or ends, the node evicts other blocks."""
    store = open_pool(f"pool://{node.address}")
    put(store, names(10), BLOCK_BYTES)
    with _borrowing(node) as borrower:
        send_views(borrower.connection, [REQUEST.pack(GET, 1), *names(1)])
        assert receive(borrower.connection, 1) == b"\1"
        (slot,) = borrower.slots(1)
        before = bytes(slot)
        put(store, names(30, first=50), BLOCK_BYTES)
        assert bytes(slot) == before
        send_views(borrower.connection, [DONE])
    for turn in range(1000):
        put(store, names(10, first=1000 + 10 * turn), BLOCK_BYTES)
        if bytes(slot) != before:
            break
    assert bytes(slot) != before
    store.close()


def test_bytes_that_somebody_has_changed_in_lent_memory_are_a_miss(node: StoreNode) -> None:
    store = open_pool(f"pool://{node.address}")
    put(store, names(2), BLOCK_BYTES)
    with _borrowing(node) as borrower:
        send_views(borrower.connection, [REQUEST.pack(GET, 1), *names(1)])
        receive(borrower.connection, 1)
        (slot,) = borrower.slots(1)
        slot[70_000] ^= 1
    assert get(store, names(2), BLOCK_BYTES) == [False, True]
    assert store.counters.damaged == 1
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_lent_nothing_and_goes_over_tcp(node: StoreNode) -> None:
    store = open_pool(f"pool://{node.address}")
    put(store, names(1), BLOCK_BYTES)
    program = (
        "import ctypes, encodings.idna, os, sys\n"
        "from baton.move.ipc.shared_memory import machine_id\n"
        "from baton.move.store.store_url import open_store\n"
        "machine_id()  # what Python loads for it may be out of that user's reach\n"
        "os.setuid(65534)\n"
        "ctypes.CDLL(None).prctl(4, 1)  # as every process of that user's: it may look at its own namespaces\n"
        f"store = open_store(sys.argv[1], layout_fingerprint='a layout', block_bytes={BLOCK_BYTES})\n"
        f"memory = memoryview(bytearray({BLOCK_BYTES}))\n"
        "print(store.is_near, *store.get([(bytes.fromhex(sys.argv[2]), memory)]))\n"
        "store.close()\n"
    )
    command = [sys.executable, "-c", program, f"pool://{node.address}", names(1)[0].hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
    store.close()


def test_a_node_that_ends_keeps_no_memory_for_those_who_still_have_it_mapped() -> None:
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
    store = open_pool(f"pool://{node.address}")
    put(store, names(5), BLOCK_BYTES)
    with _borrowing(node) as borrower:
        assert any(borrower.memory)
        node.close()
        assert not any(borrower.memory)
    store.close()


def test_memory_of_a_node_that_is_gone_is_not_kept() -> None:
    before = _mappings()
    with ThreadPoolExecutor(1) as threads:
        node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=10 * BLOCK_BYTES)
        host, port = node.address.rsplit(":", 1)
        hello = HELLO.pack(MAGIC, fingerprint_digest("a layout"), BLOCK_BYTES)
        dialer = NodeDialer((host, int(port)), hello, threads, shares=1)
        dialer.connect().connection.close()
        assert _mappings() > before
        node.close()
        del node
        with pytest.raises(OSError, match="refused"):
            dialer.connect()
        assert _mappings() <= before


def _mappings() -> int:
    """How often this process has a pool's memory mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:baton-pool")
