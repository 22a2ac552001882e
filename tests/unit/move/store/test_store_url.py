"""Store URLs: the stores that they open, and all of their mistakes in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.move.store.file import FileStore
from baton.move.store.memory import MemoryStore
from baton.move.store.segments import slot_bytes
from baton.move.store.store_url import open_store, parse_store_url
from tests.stores import get, names, put


def test_a_file_url_opens_a_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a%20folder?bytes=1e6&threads=2&io=buffered"
    store = open_store(url, layout_fingerprint="a", block_bytes=4096)
    assert isinstance(store, FileStore)
    assert (store.io_mode, store.capacity_blocks) == ("buffered", 1_000_000 // slot_bytes(4096))
    assert put(store, names(2), 4096) == [True, True]
    store.close()
    assert (tmp_path / "a folder" / "store.json").exists()


def test_the_size_in_the_url_goes_first(tmp_path: Path) -> None:
    told = open_store("memory://?bytes=8192", layout_fingerprint="a", block_bytes=4096, capacity_bytes=1 << 20)
    given = open_store("memory://", layout_fingerprint="a", block_bytes=4096, capacity_bytes=1 << 20)
    assert isinstance(told, MemoryStore)
    assert (told.capacity_blocks, given.capacity_blocks) == (2, 256)


@pytest.mark.parametrize(
    ("url", "problems"),
    [
        ("nfs://host/share", ["no kind of store 'nfs'", "file, mooncake, pool, redis, rediss, s3, memory"]),
        ("/var/cache", ["no kind of store ''"]),
        ("file:///kv", ["needs its size"]),
        ("file://kv?bytes=1e9", ["must be absolute"]),
        ("file:///kv?bytes=-5", ["bytes=-5 must be a whole number", "needs its size"]),
        ("file:///kv?bytes=1.5", ["bytes=1.5 must be a whole number"]),
        ("file:///kv?bytes=1e9&bytes=2e9", ["bytes is given twice"]),
        (
            "file:///kv?byte=1e9&io=fast&threads=0",
            ["did you mean bytes", "io=fast must be one of", "threads=0 must be"],
        ),
        ("file:///kv?bytes=1e9&key_file=", ["key_file is empty"]),
        ("memory://kv?bytes=1e9", ["it takes only options"]),
        ("pool://host?streams=0", ["needs a host and a port", "streams=0 must be"]),
        ("pool://host:8700?via=udp", ["via=udp must be one of auto, tcp"]),
        ("mooncake://host/kv?devices=mlx5_0", ["host and port of a master", "devices are for protocol=rdma"]),
        ("mooncake://host:1?protocol=udp", ["protocol=udp must be one of tcp, rdma"]),
        ("mooncake://host:1?metrics_port=0", ["metrics_port=0 must be a whole number between 1 and 65535"]),
        ("redis:///0?tls=1", ["needs a host", "there is no option tls"]),
        ("redis://host:0/?ttl_s=x", ["its port is 0", "ttl_s=x must be a whole number"]),
        ("redis://host:70000", ["70000|range"]),
        ("s3:///prefix?endpoint=host:9000", ["needs a bucket", "endpoint=host:9000 must begin with"]),
        ("s3://key:secret@bucket/", ["access keys do not belong into a URL"]),
    ],
)
def test_every_mistake_in_a_url_is_told_at_once(url: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_store_url(url)
    told = str(refused.value)
    assert all(any(word in told for word in problem.split("|")) for problem in problems), told
    assert "secret" not in told


def test_a_url_with_a_key_opens_an_encrypted_store(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("5a" * 32)
    url = f"file://{tmp_path}/store?bytes=1e6&key_file={key}"
    store = open_store(url, layout_fingerprint="a", block_bytes=4096)
    assert store.name == "encrypted file"
    assert put(store, names(2), 4096) == [True, True]
    assert get(store, names(2), 4096) == [True, True]
    store.close()
