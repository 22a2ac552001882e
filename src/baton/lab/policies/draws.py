"""Deterministic pseudo-random numbers that depend on names alone, so that policies stay pure."""

from __future__ import annotations

from hashlib import blake2b


def draw(name: str, seed: int, below: int) -> int:
    """Return a number from 0 to `below` - 1 for this name and seed, uniform over names. `below` is at least 1."""
    digest = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % below
