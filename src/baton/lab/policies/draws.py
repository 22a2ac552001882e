"""Numbers that look random and are not: each depends on names alone, so that the same view gives the same answer."""

from __future__ import annotations

from hashlib import blake2b


def draw(name: str, seed: int, below: int) -> int:
    """Return a number from 0 to `below` - 1 (at least 1), even over names, the same for the same name and seed."""
    digest = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below
