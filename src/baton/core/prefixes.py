"""Prefix-cache events of a host's arena, and of an engine server's own cache, used for routing."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, HostId


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
