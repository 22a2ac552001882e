"""A Mooncake Store whose processes die, hang or return wrong bytes: misses, and no caller waits for long."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import StoreError
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.port import Store
from baton.move.store.store_url import open_store
from tests.mooncake_servers import Mooncake, free_ports, mooncake
from tests.process.test_tiers import BLOCKS, PROMPT, complete, kill, tier_blocks, wait_stored
from tests.serving import alive, children, serving
from tests.stores import ask_until_reachable, content, get, names, put

pytestmark = pytest.mark.deep
BLOCK_BYTES = 200_000
CLIENT = "baton.move.store.mooncake_process"
LAYOUT = fingerprint_digest("a layout").hex()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mooncake]:
    with mooncake() as cluster:
        yield cluster


@pytest.fixture
def store(cluster: Mooncake) -> Iterator[Store]:
    store = open_store(cluster.url, layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)
    yield store
    store.drop(store.held())
    store.close()
    assert not children(os.getpid(), CLIENT)


def test_a_master_that_restarts_is_a_miss_and_comes_back(
    cluster: Mooncake, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """It has forgotten every block. The holder joins the new master by itself."""
    assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    cluster.kill_master()
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    assert put(store, names(3, first=9), BLOCK_BYTES) == [False] * 3
    store.drop(names(1))
    assert not store.counters.reachable
    assert (store.counters.misses, store.counters.refused) == (3, 3)
    with pytest.raises(StoreError, match="does not list its keys"):
        store.held()
    with caplog.at_level(logging.WARNING, logger="baton.store"):
        cluster.start_master()
        ask_until_reachable(store)
    assert [record for record in caplog.records if "answers again" in record.getMessage()]
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    assert get(store, names(3), BLOCK_BYTES) == [True] * 3


def test_a_holder_that_dies_takes_its_blocks_along(cluster: Mooncake, store: Store) -> None:
    assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    cluster.kill_holder()
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    cluster.start_holder()
    ask_until_reachable(store)
    assert put(store, names(3, first=20), BLOCK_BYTES) == [True] * 3
    assert get(store, names(3, first=20), BLOCK_BYTES) == [True] * 3


@pytest.mark.parametrize("stopped", ["master", "holder"])
def test_a_half_open_connection_is_a_miss(cluster: Mooncake, store: Store, stopped: str) -> None:
    """The process takes connections and answers nothing. A call that hangs ends with the client's process."""
    assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    process = {"master": cluster.master, "holder": cluster.holder}[stopped]
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        assert get(store, names(3), BLOCK_BYTES) == [False] * 3
        assert not store.counters.reachable
        assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    finally:
        process.send_signal(signal.SIGCONT)
    ask_until_reachable(store)
    assert put(store, names(3, first=40), BLOCK_BYTES) == [True] * 3
    assert get(store, names(3, first=40), BLOCK_BYTES) == [True] * 3


def test_a_killed_client_process_is_replaced(store: Store) -> None:
    assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    (client,) = children(os.getpid(), CLIENT)
    os.kill(client, signal.SIGKILL)
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    ask_until_reachable(store)
    assert get(store, names(3), BLOCK_BYTES) == [True] * 3
    assert children(os.getpid(), CLIENT) != [client]


def test_damage_is_a_miss_and_is_mended_by_the_next_put(cluster: Mooncake, store: Store) -> None:
    """A changed byte, a short value, the value of another block."""
    some = names(4)
    put(store, some, BLOCK_BYTES)
    keys = [f"baton:{LAYOUT}:{name.hex()}" for name in some]
    cluster.damage(*keys[:3], source=keys[3])
    assert get(store, some, BLOCK_BYTES) == [False] * 3 + [True]
    assert store.counters.damaged == 3
    assert set(store.held()) == {some[3]}
    assert put(store, some, BLOCK_BYTES) == [True] * 4
    assert get(store, some, BLOCK_BYTES) == [True] * 4


def test_a_full_store_evicts_or_refuses(store: Store) -> None:
    """Three times as many bytes as there are: what is found is right, and the store stays reachable."""
    many = names(960)
    for start in range(0, len(many), 60):
        put(store, many[start : start + 60], BLOCK_BYTES)
    found = get(store, many, BLOCK_BYTES)
    assert 0 < found.count(True) * BLOCK_BYTES <= 64 << 20
    assert store.counters.reachable
    assert store.counters.damaged == 0


def test_hosts_with_different_layouts_share_a_master(cluster: Mooncake, store: Store) -> None:
    other = open_store(cluster.url, layout_fingerprint="another layout", block_bytes=BLOCK_BYTES)
    assert put(store, names(2), BLOCK_BYTES) == [True] * 2
    assert get(other, names(2), BLOCK_BYTES) == [False] * 2
    assert other.held() == []
    other.close()


def test_blocks_are_encrypted_with_a_key_file(cluster: Mooncake, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    url = f"{cluster.url}&key_file={key}&prefix=sealed"
    store = open_store(url, layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)
    assert put(store, names(1), BLOCK_BYTES) == [True]
    assert get(store, names(1), BLOCK_BYTES) == [True]
    (stored,) = cluster.values("sealed:")
    assert content(names(1)[0], BLOCK_BYTES)[:64] not in stored
    store.close()


def test_an_opening_without_a_master_is_an_error(cluster: Mooncake) -> None:
    (port,) = free_ports(1)
    with pytest.raises(StoreError, match=rf"mooncake://127.0.0.1:{port} .*start mooncake_master, or correct"):
        open_store(f"mooncake://127.0.0.1:{port}", layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)
    assert not children(os.getpid(), CLIENT)


def test_a_server_reads_blocks_of_its_predecessor_and_survives_the_master(cluster: Mooncake) -> None:
    arguments = ("hash", "--mixed", "1", "--kv-blocks", "96", "--tier", f"{cluster.url}&prefix=served")
    with serving(*arguments) as server:
        text, cached = complete(server)
        assert cached == 0
        wait_stored(server, BLOCKS)
        clients = children(server.process.pid, CLIENT)
        kill(server)
    assert clients
    with serving(*arguments) as server:
        server.wait_until(lambda _: not any(map(alive, clients)), reason="the client's process ends with the server")
        assert complete(server)[0] == text
        assert tier_blocks(server, "loaded") > 0
        cluster.kill_master()
        try:
            assert complete(server, f"{PROMPT}again") == complete(server, f"{PROMPT}again")
        finally:
            cluster.start_master()
