"""Checksum of blocks in stores: XXH3 with 128 bits.

It runs at memory speed and detects accidents: a flipped bit, a torn write, the bytes of another block. It does not
detect deliberate changes; `EncryptedStore` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import xxhash

CHECKSUM_BYTES = 16


PART_BYTES = 4 << 20
"""Size of the parts of a block that threads or connections process in parallel."""


def checksum_in_parts(data: memoryview) -> bytes:
    """Return a block's checksum. For a large block, threads can compute the checksums of its parts in parallel."""
    if len(data) <= PART_BYTES:
        return checksum(data)
    return joined([checksum(data[start : start + PART_BYTES]) for start in range(0, len(data), PART_BYTES)])


def joined(sums: Sequence[bytes]) -> bytes:
    """Return a block's checksum from those of its parts, in order."""
    return sums[0] if len(sums) == 1 else checksum(b"".join(sums))


def checksum(data: bytes | memoryview) -> bytes:
    """Return the checksum of contiguous bytes. Releases the interpreter's lock."""
    return xxhash.xxh3_128_digest(data)


def fingerprint_digest(fingerprint: str) -> bytes:
    """Return a 16-byte digest of a layout's fingerprint, for headers and keys."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=16, person=b"baton-store").digest()
