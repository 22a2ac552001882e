"""Encryption at rest: the inner store holds no plain text, and only bytes of this key are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import StoreError
from baton.move.store.encrypted import OVERHEAD_BYTES, EncryptedStore, read_key
from baton.move.store.memory import MemoryStore
from baton.move.store.port import Store
from baton.move.store.store_url import open_store
from tests.stores import content, get, names, put

BLOCK_BYTES = 5000
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def _around(inner: Store, *, key: bytes = KEY, fingerprint: str = "a layout") -> EncryptedStore:
    return EncryptedStore(key, layout_fingerprint=fingerprint, open_inner=lambda _: inner)


@pytest.fixture
def inner() -> MemoryStore:
    size_bytes = BLOCK_BYTES + OVERHEAD_BYTES
    return MemoryStore(block_bytes=size_bytes, capacity_bytes=50 * size_bytes)


def _below(inner: MemoryStore, name: bytes) -> bytearray:
    memory = bytearray(BLOCK_BYTES + OVERHEAD_BYTES)
    assert inner.get([(name, memoryview(memory))]) == [True]
    return memory


def test_room_that_the_store_below_loses_is_known_above(inner: MemoryStore) -> None:
    """The disk becomes full during use."""
    store = _around(inner)
    assert store.capacity_blocks == 50
    inner.capacity_blocks = 7
    assert store.capacity_blocks == 7


def test_below_nothing_can_be_read(inner: MemoryStore) -> None:
    """No plain bytes are stored, and a block that is written twice has two different ciphertexts."""
    store, (name,) = _around(inner), names(1)
    put(store, [name], BLOCK_BYTES)
    first = _below(inner, name)
    store.drop([name])
    put(store, [name], BLOCK_BYTES)
    plain = content(name, BLOCK_BYTES)
    assert not any(plain[start : start + 8] in first for start in range(0, BLOCK_BYTES - 8, 8))
    assert first != _below(inner, name)
    assert first[:12] != _below(inner, name)[:12], "a nonce must not come twice"


@pytest.mark.parametrize("place", [0, 11, 12, 2000, BLOCK_BYTES + 11, BLOCK_BYTES + OVERHEAD_BYTES - 1])
def test_changed_bytes_are_a_miss(inner: MemoryStore, place: int) -> None:
    """In the nonce, the block or the tag. The block is counted and removed, and the next put stores it again."""
    store, (name, other) = _around(inner), names(2)
    put(store, [name, other], BLOCK_BYTES)
    changed = _below(inner, name)
    changed[place] ^= 4
    inner.drop([name])
    inner.put([(name, memoryview(changed))])
    before = store.counters.hits
    assert get(store, [name, other], BLOCK_BYTES) == [False, True]
    assert (store.counters.damaged, store.counters.misses, store.counters.hits - before) == (1, 1, 1)
    assert name not in store.held()
    assert put(store, [name], BLOCK_BYTES) == [True]
    assert get(store, [name], BLOCK_BYTES) == [True]


def test_blocks_that_changed_places_are_misses(inner: MemoryStore) -> None:
    """A block is bound to its name: the inner store cannot return another block of the same key."""
    store, (one, two) = _around(inner), names(2)
    put(store, [one, two], BLOCK_BYTES)
    swapped = [(one, memoryview(_below(inner, two))), (two, memoryview(_below(inner, one)))]
    inner.drop([one, two])
    inner.put(swapped)
    assert get(store, [one, two], BLOCK_BYTES) == [False, False]


@pytest.mark.parametrize(("key", "fingerprint"), [(OTHER_KEY, "a layout"), (KEY, "another layout")])
def test_another_key_or_layout_finds_nothing(inner: MemoryStore, key: bytes, fingerprint: str) -> None:
    put(_around(inner), names(2), BLOCK_BYTES)
    other = _around(inner, key=key, fingerprint=fingerprint)
    assert get(other, names(2), BLOCK_BYTES) == [False, False]
    assert (other.counters.damaged, other.counters.misses, other.counters.hits) == (2, 2, 0)


def _key_file(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_a_folder_of_another_key_is_refused(tmp_path: Path) -> None:
    """The error has both keys' fingerprints, and neither key."""
    for number, key in enumerate((KEY, OTHER_KEY)):
        _key_file(tmp_path / str(number), key)
    urls = [f"file://{tmp_path}/store?bytes=1e6&key_file={tmp_path}/{number}" for number in (0, 1)]
    open_store(urls[0], layout_fingerprint="a", block_bytes=BLOCK_BYTES).close()
    with pytest.raises(StoreError, match=r"aes-256-gcm.* there, .*aes-256-gcm.* here") as refused:
        open_store(urls[1], layout_fingerprint="a", block_bytes=BLOCK_BYTES)
    assert KEY.hex() not in str(refused.value)
    with pytest.raises(StoreError, match="aes-256-gcm"):
        open_store(urls[0].partition("&")[0], layout_fingerprint="a", block_bytes=BLOCK_BYTES + OVERHEAD_BYTES)
    open_store(urls[0], layout_fingerprint="a", block_bytes=BLOCK_BYTES).close()


def test_a_key_is_32_bytes_or_their_digits(tmp_path: Path) -> None:
    assert read_key(_key_file(tmp_path / "raw", KEY)) == KEY
    assert read_key(_key_file(tmp_path / "digits", KEY.hex().encode() + b"\n")) == KEY


@pytest.mark.parametrize(
    ("data", "mode", "problem"),
    [
        (KEY, 0o644, "mode 644"),
        (KEY, 0o660, "mode 660"),
        (KEY[:31], 0o600, "has 31 bytes"),
        (b"", 0o600, "has 0 bytes"),
        (b"x" * 64, 0o600, "64 hexadecimal digits"),
    ],
)
def test_a_key_file_that_is_no_secret_or_no_key_is_refused(
    tmp_path: Path, data: bytes, mode: int, problem: str
) -> None:
    with pytest.raises(StoreError, match=problem):
        read_key(_key_file(tmp_path / "key", data, mode))


def test_a_key_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read the key file"):
        read_key(tmp_path / "nothing")
