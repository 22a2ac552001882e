"""The checksum of everything that leaves this process's memory.

XXH3 in 128 bits: it finds accidents (a flipped bit, a torn write, another block's bytes) and runs at the speed of
memory. It does not stop somebody who changes bytes on purpose: `EncryptedStore` does.
"""

from __future__ import annotations

import hashlib

import xxhash

CHECKSUM_BYTES = 16


def checksum(data: bytes | memoryview) -> bytes:
    """Sum up bytes that lie in one piece. Lets other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def fingerprint_digest(fingerprint: str) -> bytes:
    """Sixteen bytes that stand for a layout's fingerprint, in headers and keys."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=16, person=b"baton-store").digest()
