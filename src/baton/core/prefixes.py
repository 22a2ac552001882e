"""Prefix-cache events of a host's arena, used for routing."""

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
