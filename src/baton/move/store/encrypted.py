"""Encryption at rest: AES-256-GCM around any other store."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from baton.core.errors import StoreError
from baton.core.types import BlockHash
from baton.move.store.checksum import fingerprint_digest
from baton.move.store.port import Store, StoreCounters

KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES
"""Additional bytes per block."""
GROUP_BYTES = 64 << 20
"""Maximum bytes of the blocks that are encrypted or decrypted at a time."""


class EncryptedStore:
    """Encrypt each block under a random nonce, and authenticate its hash and layout.

    With random nonces, one key is safe for 2^32 blocks. The inner store sees hashes, sizes and times. Its fingerprint
    contains that of the key: a folder of another key is refused, and on a server another key finds no blocks.
    """

    def __init__(self, key: bytes, *, layout_fingerprint: str, open_inner: Callable[[str], Store]) -> None:
        """`open_inner` opens the inner store for a fingerprint and blocks that are OVERHEAD_BYTES larger."""
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise StoreError("encryption lacks a package: pip install cryptography") from None
        self._cipher = AESGCM(key)
        self._wrong: type[Exception] = InvalidTag
        fingerprint = f"{layout_fingerprint} aes-256-gcm:{key_fingerprint(key)}"
        self._context = fingerprint_digest(fingerprint)
        self._inner = open_inner(fingerprint)
        self._lock = threading.Lock()
        self._forged = 0
        """Blocks that the inner store accepted and decryption refused."""
        self.name = f"encrypted {self._inner.name}"

    @property
    def capacity_blocks(self) -> int | None:
        """Capacity of the inner store, which may shrink."""
        return self._inner.capacity_blocks

    @property
    def counters(self) -> StoreCounters:
        """Counters of the inner store, with blocks that could not be decrypted counted as damaged."""
        inner, forged = self._inner.counters, self._forged
        return replace(inner, hits=inner.hits - forged, misses=inner.misses + forged, damaged=inner.damaged + forged)

    def put(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        return [kept for group in _groups(blocks) for kept in self._inner.put([self._encrypted(*b) for b in group])]

    def get(self, blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        return [found for group in _groups(blocks) for found in self._get_group(group)]

    def drop(self, hashes: Iterable[BlockHash]) -> None:
        self._inner.drop(hashes)

    def held(self) -> list[BlockHash]:
        return self._inner.held()

    def close(self) -> None:
        self._inner.close()

    def _encrypted(self, block_hash: BlockHash, memory: memoryview) -> tuple[BlockHash, memoryview]:
        sealed = memoryview(np.empty(memory.nbytes + OVERHEAD_BYTES, np.uint8))
        sealed[:NONCE_BYTES] = os.urandom(NONCE_BYTES)
        self._cipher.encrypt_into(sealed[:NONCE_BYTES], memory, self._context + block_hash, sealed[NONCE_BYTES:])
        return block_hash, sealed

    def _get_group(self, group: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        sealed = [
            (block_hash, memoryview(np.empty(memory.nbytes + OVERHEAD_BYTES, np.uint8))) for block_hash, memory in group
        ]
        there = self._inner.get(sealed)
        return [
            is_there and self._decrypted(block_hash, memory, into)
            for is_there, (block_hash, memory), (_, into) in zip(there, sealed, group, strict=True)
        ]

    def _decrypted(self, block_hash: BlockHash, sealed: memoryview, into: memoryview) -> bool:
        try:
            self._cipher.decrypt_into(
                sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._context + block_hash, into.cast("B")
            )
        except self._wrong:
            self._inner.drop([block_hash])
            with self._lock:
                self._forged += 1
            return False
        return True


def _groups(blocks: Sequence[tuple[BlockHash, memoryview]]) -> list[Sequence[tuple[BlockHash, memoryview]]]:
    size_bytes = max([memory.nbytes for _, memory in blocks], default=0)
    count = max(1, GROUP_BYTES // max(1, size_bytes))
    return [blocks[start : start + count] for start in range(0, len(blocks), count)]


def key_fingerprint(key: bytes) -> str:
    """Return a digest that identifies a key without revealing it."""
    return hashlib.blake2b(key, digest_size=8, person=b"baton-key").hexdigest()


def read_key(path: Path) -> bytes:
    """Read a key: 32 bytes, or 64 hexadecimal digits. Raises StoreError, also if other users may read the file."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(256)
    except OSError as error:
        raise StoreError(f"cannot read the key file {path}: {error}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise StoreError(
            f"the key file {path} has mode {stat.S_IMODE(status.st_mode):03o} and belongs to user {status.st_uid}: "
            f"it must be readable by your user only (chmod 600 {path})"
        )
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise StoreError(
            f"the key file {path} has {len(data)} bytes: "
            f"it must have {KEY_BYTES}, or {2 * KEY_BYTES} hexadecimal digits"
        )
    return key
