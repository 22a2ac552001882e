"""Chained block hashes: a block's name says what it holds and everything that stands before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from baton.core.types import BlockHash, Request, pack_tokens

HASH_BYTES = 16
_TOKEN_BYTES = 4
"""Of one token, as `pack_tokens` writes it."""


def root_hash(cache_salt: str) -> BlockHash:
    """The parent of a first block. Requests with different salts never share a block."""
    return BlockHash(blake2b(cache_salt.encode(), digest_size=HASH_BYTES, person=b"baton-root").digest())


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Name a full block by its parent's name and its own tokens."""
    return _named(parent, pack_tokens(tokens))


def _named(parent: BlockHash, packed: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + packed, digest_size=HASH_BYTES, person=b"baton-block").digest())


def block_hashes(tokens: Sequence[int], *, block_tokens: int, cache_salt: str = "") -> tuple[BlockHash, ...]:
    """Hash every full block of `tokens`, in order. The tail, if any, has no hash yet."""
    parent = root_hash(cache_salt)
    hashes: list[BlockHash] = []
    packed = pack_tokens(tokens)
    block_bytes = _TOKEN_BYTES * block_tokens
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = _named(parent, packed[start : start + block_bytes])
        hashes.append(parent)
    return tuple(hashes)


def runs_per_block(block_tokens: int, hash_tokens: int) -> int:
    """Count the hashed runs of a block, where tokens are hashed in other runs than the host's blocks are cut in.

    Only whole runs make a name: whoever picks the runs for a cluster takes a divisor of every host's block size.
    """
    runs, rest = divmod(block_tokens, hash_tokens)
    assert rest == 0 < runs, f"a block of {block_tokens} tokens is no whole number of hashed runs of {hash_tokens}"
    return runs


def prefix_of(request: Request, *, block_runs: int, block_tokens: int) -> tuple[BlockHash, ...]:
    """Name the full blocks of a prompt that others may go on from, on a host whose blocks are cut so.

    Never all of the prompt: whoever goes on in these blocks computes its last token, and others read them.
    """
    return names_of(request.block_hashes, block_runs)[: (request.prompt_tokens - 1) // block_tokens]


def names_of(hashes: Sequence[BlockHash], runs: int) -> tuple[BlockHash, ...]:
    """Name the full blocks of tokens that are hashed in shorter runs, `runs` to a block: by the hash of the last one.

    It is chained over all before it, so it names the block as well as a hash of the block would. A prefix that hosts of
    several block sizes hold has the same names on all of them, of which those with larger blocks know every nth.
    """
    return tuple(hashes[runs - 1 :: runs])
