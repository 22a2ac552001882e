"""Stores whose server dies, comes back, is full or returns wrong bytes: misses, and no caller waits."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.core.errors import StoreError
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.object_store import ObjectPlace, ObjectStore
from baton.move.store.port import Store
from baton.move.store.redis_store import RedisStore
from baton.move.store.store_url import open_store
from tests.store_servers import redis_server, s3_server
from tests.stores import ask_until_reachable, get, names, put

BLOCK_BYTES = 200_000
LAYOUT = fingerprint_digest("a layout").hex()


def _redis(port: int, *, block_bytes: int = BLOCK_BYTES, ttl: str = "?ttl_s=3600") -> Store:
    return open_store(f"redis://127.0.0.1:{port}/0{ttl}", layout_fingerprint="a layout", block_bytes=block_bytes)


def _objects(endpoint: str) -> ObjectStore:
    place = ObjectPlace(
        bucket="blocks", endpoint=endpoint, region="us-east-1", access_key_id="key", secret_access_key="secret"
    )
    return ObjectStore(place, layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("blocks") as endpoint:
        yield endpoint


def test_a_redis_that_dies_is_a_miss_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as port:
        store = _redis(port)
        assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    assert put(store, names(3, first=9), BLOCK_BYTES) == [False] * 3
    store.drop(names(1))
    assert not store.counters.reachable
    assert (store.counters.misses, store.counters.refused) == (3, 3)
    with pytest.raises(StoreError, match="does not list"):
        store.held()
    with redis_server(tmp_path, port=port), caplog.at_level(logging.WARNING, logger="baton.store"):
        ask_until_reachable(store)
        assert get(store, names(3), BLOCK_BYTES) == [False] * 3, "it has restarted empty"
        assert put(store, names(3), BLOCK_BYTES) == [True] * 3
        assert get(store, names(3), BLOCK_BYTES) == [True] * 3
    assert [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    store.close()


def test_a_redis_that_is_full_keeps_nothing_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It answers with an error: the store stays reachable, and stored blocks are found."""
    with redis_server(tmp_path, options=("--maxmemory", "6mb")) as port:
        store = _redis(port)
        kept = [put(store, [name], BLOCK_BYTES)[0] for name in names(60)]
        assert kept[0]
        assert not kept[-1]
        assert get(store, names(60), BLOCK_BYTES) == kept
        assert store.counters.reachable
        assert store.counters.io_errors >= kept.count(False)
        assert len([record for record in caplog.records if "refuses" in record.getMessage()]) == 1
        store.close()


def test_damage_in_a_redis_is_a_miss_and_is_mended_by_the_next_put(tmp_path: Path) -> None:
    """A changed byte, a missing piece, the bytes or the header of another block."""
    import redis

    with redis_server(tmp_path) as port:
        store, client = _redis(port, block_bytes=3 << 20), redis.Redis(port=port)
        some = names(5)
        put(store, some, 3 << 20)
        keys = [f"baton:{LAYOUT}:{name.hex()}" for name in some]
        client.setrange(keys[0] + ":1", 70_000, b"\0\1\2\3")
        client.delete(keys[1] + ":2")
        client.set(keys[2] + ":0", client.get(keys[3] + ":0"))
        client.set(keys[4], client.get(keys[3]))
        assert get(store, some, 3 << 20) == [False, False, False, True, False]
        assert store.counters.damaged == 3
        assert put(store, some, 3 << 20) == [True] * 5
        assert get(store, some, 3 << 20) == [True] * 5
        assert client.ttl(keys[0]) > 3000
        assert client.ttl(keys[0] + ":2") > 3000
        client.close()
        store.close()


def test_a_redis_without_any_bound_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as port:
        _redis(port).close()
        assert caplog.text == ""
        _redis(port, ttl="").close()
    assert "grows until its machine is out of memory" in caplog.text


def test_hosts_with_different_layouts_share_a_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as port:
        url = f"redis://127.0.0.1:{port}/0?ttl_s=60"
        ours = open_store(url, layout_fingerprint="ours", block_bytes=BLOCK_BYTES)
        theirs = open_store(url, layout_fingerprint="theirs", block_bytes=BLOCK_BYTES)
        put(ours, names(2), BLOCK_BYTES)
        assert (theirs.held(), get(theirs, names(2), BLOCK_BYTES)) == ([], [False, False])
        assert get(ours, names(2), BLOCK_BYTES) == [True, True]
        ours.close()
        theirs.close()


def test_an_opening_that_nobody_answers_is_an_error(tmp_path: Path) -> None:
    """An error with the address, instead of a store that loses all blocks."""
    with redis_server(tmp_path) as port:
        pass
    with pytest.raises(StoreError, match=f"no Redis answers at redis://127.0.0.1:{port}"):
        open_store(f"redis://:secret@127.0.0.1:{port}/0", layout_fingerprint="a", block_bytes=64)
    with pytest.raises(StoreError, match="correct bucket") as refused:
        _objects(f"http://127.0.0.1:{port}")
    assert str(port) in str(refused.value)


def test_a_password_is_in_no_error(tmp_path: Path) -> None:
    with redis_server(tmp_path, options=("--requirepass", "open sesame")) as port:
        with pytest.raises(StoreError) as refused:
            open_store(f"redis://:wrong-secret@127.0.0.1:{port}/0", layout_fingerprint="a", block_bytes=64)
        assert "secret" not in str(refused.value)
        store = open_store(f"redis://:open%20sesame@127.0.0.1:{port}/0", layout_fingerprint="a", block_bytes=64)
        assert put(store, names(1), 64) == [True]
        store.close()


def test_a_bucket_that_is_not_there_is_an_error(endpoint: str) -> None:
    place = ObjectPlace(
        bucket="nobody", endpoint=endpoint, region="us-east-1", access_key_id="key", secret_access_key="secret"
    )
    with pytest.raises(StoreError, match="s3://nobody"):
        ObjectStore(place, layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)


def test_an_object_store_that_dies_is_a_miss() -> None:
    with s3_server("blocks") as endpoint:
        store = _objects(endpoint)
        assert put(store, names(3), BLOCK_BYTES) == [True] * 3
    assert get(store, names(3), BLOCK_BYTES) == [False] * 3
    assert put(store, names(3, first=9), BLOCK_BYTES) == [False] * 3
    store.drop(names(1))
    assert not store.counters.reachable
    with pytest.raises(StoreError, match="does not list"):
        store.held()
    store.close()


def test_damage_in_an_object_is_a_miss_and_is_mended_by_the_next_put(endpoint: str) -> None:
    import obstore

    store, some = _objects(endpoint), names(4)
    put(store, some, BLOCK_BYTES)
    bucket = store._bucket
    whole = bytes(obstore.get(bucket, some[0].hex()).bytes())
    obstore.put(bucket, some[0].hex(), whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    obstore.put(bucket, some[1].hex(), whole[:-1])
    obstore.put(bucket, some[2].hex(), whole)
    assert get(store, some, BLOCK_BYTES) == [False, False, False, True]
    assert store.counters.damaged == 3
    assert put(store, some, BLOCK_BYTES) == [True] * 4
    assert get(store, some, BLOCK_BYTES) == [True] * 4
    store.drop(some)
    store.close()


def test_a_redis_store_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(StoreError, match=r"baton\[redis\]"):
        RedisStore("redis://127.0.0.1", layout_fingerprint="a", block_bytes=64)


def test_a_mooncake_store_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is hidden from the process of the client."""
    (tmp_path / "mooncake.py").write_text("raise ImportError('hidden')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(StoreError, match=r"baton\[mooncake\]"):
        open_store("mooncake://127.0.0.1:1", layout_fingerprint="a layout", block_bytes=BLOCK_BYTES)
