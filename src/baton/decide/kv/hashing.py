"""Chained block hashes: the hash of a block covers its tokens and all tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from baton.core.types import BlockHash, Request, pack_tokens

HASH_BYTES = 16
_TOKEN_BYTES = 4
"""Bytes of one token as written by `pack_tokens`."""
_BLOCK_HASHER = blake2b(digest_size=HASH_BYTES, person=b"baton-block")


def root_hash(cache_salt: str) -> BlockHash:
    """Return the parent hash of a first block. Requests with different salts never share a block."""
    return BlockHash(_root(cache_salt.encode()))


def _root(text: bytes) -> bytes:
    return blake2b(text, digest_size=HASH_BYTES, person=b"baton-root").digest()


def block_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Return the hash of a full block from its parent's hash and its own tokens."""
    return _chained(parent, pack_tokens(tokens))


def _chained(parent: BlockHash, packed: bytes) -> BlockHash:
    hasher = _BLOCK_HASHER.copy()  # takes two thirds of the time of a new one
    hasher.update(parent + packed)
    return BlockHash(hasher.digest())


def block_hashes(
    tokens: Sequence[int], *, block_tokens: int, cache_salt: str = "", public_tokens: int = 0
) -> tuple[BlockHash, ...]:
    """Return the hash of every full block of `tokens`, in order. The tail has no hash.

    `public_tokens`: leading tokens whose full blocks are shared by all salts. The last full block always depends on the
    salt, and so do the blocks of the output, which are hashed after it.
    """
    public_blocks = min(public_tokens, len(tokens) - block_tokens) // block_tokens if cache_salt else 0
    parent = root_hash("" if public_blocks > 0 else cache_salt)
    hashes: list[BlockHash] = []
    packed = pack_tokens(tokens)
    block_bytes = _TOKEN_BYTES * block_tokens
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        if len(hashes) == public_blocks > 0:
            parent = BlockHash(_root(parent + cache_salt.encode()))
        parent = _chained(parent, packed[start : start + block_bytes])
        hashes.append(parent)
    return tuple(hashes)


def runs_per_block(block_tokens: int, hash_tokens: int) -> int:
    """Return the number of hashes per block of a host, where each hash covers `hash_tokens` tokens.

    `hash_tokens` must divide the block size of every host.
    """
    runs, rest = divmod(block_tokens, hash_tokens)
    assert rest == 0 < runs, f"a block of {block_tokens} tokens is not a multiple of the hashed runs of {hash_tokens}"
    return runs


def prefix_of(request: Request, *, block_runs: int, block_tokens: int) -> tuple[BlockHash, ...]:
    """Return the hashes of the full blocks of a prompt that can be used as a prefix hit on a host.

    Never covers the whole prompt: its last token must be computed, and not into a shared block.
    """
    return hashes_per_block(request.block_hashes, block_runs)[: (request.prompt_tokens - 1) // block_tokens]


def hashes_per_block(hashes: Sequence[BlockHash], runs: int) -> tuple[BlockHash, ...]:
    """Return one hash per block, given `runs` hashes per block: the last hash of each block.

    Hashes are chained, so the last one identifies the block. Hosts with different block sizes share the hashes of a
    common prefix: a host with blocks of n runs knows every nth hash.
    """
    return tuple(hashes[runs - 1 :: runs])
