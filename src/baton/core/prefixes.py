"""Prefix-cache events of arenas and of other engines' caches, for routing, and the blocks of a kept arena."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, BlockId, HostId


class SealedBlock(Struct, frozen=True, array_like=True, gc=False):
    """A sealed block of an arena that a host keeps while its server restarts."""

    block: BlockId
    block_hash: BlockHash
    parent: BlockHash | None
    """Hash of the previous block. None: this is the first block of a prompt, or the previous one is not known."""
    start_tokens: int
    """Number of tokens before the block."""
    tenant: str


class BlocksStored(Struct, frozen=True, tag=True, gc=False):
    """A host's arena has cached these blocks. Blocks in tiers are looked up when a request arrives instead."""

    host: HostId
    hashes: tuple[BlockHash, ...]
    block_runs: int = 1
    """Hashes per block of this host: it knows only every `block_runs`-th hash of a prompt."""


class BlocksRemoved(Struct, frozen=True, tag=True, gc=False):
    """The host's arena has evicted these blocks. A tier may have them."""

    host: HostId
    hashes: tuple[BlockHash, ...]


class CachedRun(Struct, frozen=True, gc=False):
    """Consecutive full blocks of one prompt that an engine server has cached."""

    parent: BlockHash | None
    """Hash of the block before them. None: they begin the prompt."""
    first: int
    """Index of the first one in the prompt."""
    hashes: tuple[BlockHash, ...]


class EngineCacheChanged(Struct, frozen=True, tag=True, gc=False):
    """A server of another engine has cached and evicted blocks, which the pool of its host mirrors."""

    host: HostId
    stored: tuple[CachedRun, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    """Applied before `stored`."""
    is_cleared: bool = False
    """All blocks are removed before: the server has emptied its cache, or events were lost."""
