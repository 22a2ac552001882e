"""What a pool node lends to its own machine: its memory, the board of its blocks, and slots to fill without asking."""

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

from baton.core.types import BlockHash
from baton.move.ipc.lending import mapped
from baton.move.store.checksum import checksum, fingerprint_digest
from baton.move.store.node import StoreNode
from baton.move.store.node_link import Dialer
from baton.move.store.node_slots import SLOTS_A_SPARE
from baton.move.store.node_store import NodeStore
from baton.move.store.node_wire import (
    ANSWER,
    DONE,
    FILL,
    GET,
    HELLO,
    KEPT,
    MAGIC,
    PLACE,
    PUT,
    REQUEST,
    SPARE,
    THERE,
    receive,
    send_all,
)
from tests.stores import BLOCK_BYTES, content, get, names, open_pool, put

SMALL_BYTES, SLOTS = 1000, 4 * SLOTS_A_SPARE


@dataclass
class _Borrower:
    """A process of the node's machine that is lent its memory, word by word."""

    connection: socket.socket
    memory: memoryview

    def slots(self, count: int) -> list[memoryview]:
        """Read where blocks lie, or may lie."""
        places = PLACE.iter_unpack(receive(self.connection, count * PLACE.size))
        return [self.memory[offset : offset + BLOCK_BYTES] for _, offset in places]

    def spare(self, there: BlockHash) -> int:
        """Put a block that is there already. Returns which slot we may fill instead."""
        send_all(self.connection, [REQUEST.pack(PUT, 1), there])
        assert receive(self.connection, 2) == b"\0\1"
        return SPARE.unpack(receive(self.connection, SPARE.size))[0]

    def fill(self, name: BlockHash, spare: int) -> tuple[int, int]:
        """Put a block without asking. Returns what became of it, and which slot we may fill next."""
        data = content(name, SMALL_BYTES)
        self.memory[spare : spare + SMALL_BYTES] = data
        send_all(self.connection, [REQUEST.pack(FILL, 1), name, checksum(data)])
        outcome, (offset,) = receive(self.connection, 1), SPARE.unpack(receive(self.connection, SPARE.size))
        return outcome[0], offset


@contextmanager
def _borrowing(node: StoreNode, block_bytes: int = BLOCK_BYTES) -> Iterator[_Borrower]:
    hello = HELLO.pack(MAGIC, fingerprint_digest("a layout"), block_bytes)
    host, port = node.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as far:
        send_all(far, [hello])
        name = ANSWER.unpack(receive(far, ANSWER.size))[-1].rstrip(b"\0").decode().partition("/")[2]
    with socket.socket(socket.AF_UNIX) as near:
        near.connect("\0" + name)
        send_all(near, [hello])
        _, (descriptor, board), _, _ = socket.recv_fds(near, ANSWER.size, 2)
        memory = mapped(descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)
        os.close(board)
        yield _Borrower(near, memory)


def test_on_the_nodes_machine_its_memory_is_lent(node: StoreNode) -> None:
    """Bytes go over no socket then; `via=tcp` says that they shall. Both find what the other has put."""
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


@pytest.fixture
def many() -> Iterator[StoreNode]:
    """Slots enough that clients are given spare ones."""
    node = StoreNode(host="127.0.0.1", port=0, capacity_bytes=SLOTS * SMALL_BYTES)
    yield node
    node.close()


def test_blocks_that_are_put_one_by_one_use_every_slot(many: StoreNode) -> None:
    """Though one waits for the next block all the while; what is put after that costs the oldest ones their place."""
    store, wanted = open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES), names(SLOTS + 40)
    for name in wanted[:SLOTS]:
        assert put(store, [name], SMALL_BYTES) == [True]
    assert get(store, wanted[:SLOTS], SMALL_BYTES) == [True] * SLOTS
    for name in wanted[SLOTS:]:
        assert put(store, [name], SMALL_BYTES) == [True]
    kept = wanted[-(SLOTS - 1) :]
    assert store.held() == kept, "one slot is spare"
    found = get(store, wanted, SMALL_BYTES)
    assert all(found[-len(kept) :])
    assert not any(found[:40]), "other blocks are in their slots; in the spare one may be the 41st"
    assert (store.counters.put, store.counters.damaged) == (len(wanted), 0)
    store.close()


def test_a_block_that_is_there_already_leaves_the_spare_slot_spare(many: StoreNode) -> None:
    """Whether its board tells, or the node has to: then the copy was for nothing. It counts as young again."""
    ours, theirs = (open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES) for _ in range(2))
    for store in (ours, theirs, ours, theirs):
        for name in names(5):
            assert put(store, [name], SMALL_BYTES) == [True]
    assert (ours.counters.put, theirs.counters.put) == (5, 0)
    assert put(ours, names(1), SMALL_BYTES) == [True]
    assert ours.held() == [*names(4, first=1), *names(1)]
    with _borrowing(many, SMALL_BYTES) as borrower:
        spare = borrower.spare(names(1)[0])
        assert borrower.fill(names(1)[0], spare) == (THERE, spare)
        outcome, next_spare = borrower.fill(names(1, first=9)[0], spare)
        assert (outcome, next_spare == spare) == (KEPT, False)
    assert get(ours, [*names(5), *names(1, first=9)], SMALL_BYTES) == [True] * 6
    ours.close()
    theirs.close()


def test_the_spare_slot_of_a_client_that_ends_is_free_again(many: StoreNode) -> None:
    for turn in range(6):
        store = open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES)
        assert put(store, names(1, first=turn), SMALL_BYTES) == [True]
        store.close()
    store = open_pool(f"pool://{many.address}", block_bytes=SMALL_BYTES)
    for _ in range(1000):  # the node's threads notice in their own time
        put(store, names(SLOTS), SMALL_BYTES)
        if len(store.held()) == SLOTS:
            break
    assert get(store, names(SLOTS), SMALL_BYTES) == [True] * SLOTS
    store.close()


def test_what_was_forgotten_is_a_miss_and_no_damage(node: StoreNode) -> None:
    """Rows of it may still stand where clients look; other blocks' bytes are in its slots."""
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
        send_all(borrower.connection, [REQUEST.pack(PUT, 10), *half])
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
    """Until the borrower says that it is done, or ends: the node forgets other blocks first."""
    store = open_pool(f"pool://{node.address}")
    put(store, names(10), BLOCK_BYTES)
    with _borrowing(node) as borrower:
        send_all(borrower.connection, [REQUEST.pack(GET, 1), *names(1)])
        assert receive(borrower.connection, 1) == b"\1"
        (slot,) = borrower.slots(1)
        before = bytes(slot)
        put(store, names(30, first=50), BLOCK_BYTES)
        assert bytes(slot) == before
        send_all(borrower.connection, [DONE])
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
        send_all(borrower.connection, [REQUEST.pack(GET, 1), *names(1)])
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
        "from baton.move.ipc.lending import machine\n"
        "from baton.move.store.opening import open_store\n"
        "machine()  # what Python loads for it may be out of that user's reach\n"
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
        dialer = Dialer((host, int(port)), hello, threads, shares=1)
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
