"""The checksum of everything that leaves this process's memory.

XXH3 in 128 bits: it finds accidents (a flipped bit, a torn write, another block's bytes) and runs at the speed of
memory. It does not stop somebody who changes bytes on purpose: `EncryptedStore` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import xxhash

CHECKSUM_BYTES = 16


PART_BYTES = 4 << 20
"""Of a block: worth a thread, or a stream, of its own."""


def checksum_in_parts(data: memoryview) -> bytes:
    """Sum up parts of a block, and then their sums: several threads can share a large one."""
    if len(data) <= PART_BYTES:
        return checksum(data)
    return joined([checksum(data[start : start + PART_BYTES]) for start in range(0, len(data), PART_BYTES)])


def joined(sums: Sequence[bytes]) -> bytes:
    """The sum of a block from those of its parts, in order."""
    return sums[0] if len(sums) == 1 else checksum(b"".join(sums))


def checksum(data: bytes | memoryview) -> bytes:
    """Sum up bytes that lie in one piece. Lets other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data)


def fingerprint_digest(fingerprint: str) -> bytes:
    """Sixteen bytes that stand for a layout's fingerprint, in headers and keys."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=16, person=b"baton-store").digest()
