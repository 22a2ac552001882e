"""What a host's arena has for whoever asks by name: news for routing."""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, HostId


class BlocksStored(Struct, frozen=True, tag=True, gc=False):
    """A host's arena has these blocks now, to be a prefix. What lies in tiers is told with each request."""

    host: HostId
    hashes: tuple[BlockHash, ...]
    block_runs: int = 1
    """Hashed runs of tokens that a block of this host has: it knows every nth of a prompt's hashes."""


class BlocksRemoved(Struct, frozen=True, tag=True, gc=False):
    """They are not in the host's arena any more. A tier may have them."""

    host: HostId
    hashes: tuple[BlockHash, ...]
