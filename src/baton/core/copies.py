"""Events and commands of a transfer between two hosts: for both pools, and for the movers that copy.

A transfer first asks for blocks to land in, then leases the blocks to read, then copies, then tells both pools. While a
request is still computed, its sealed blocks may be sent ahead to where it will probably go on. There they are cached
without a holder, and a later transfer finds them.
"""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId


class LayerSpan(Struct, frozen=True, array_like=True):
    """A run of a model's layers: `first` .. before `end`, of `total`."""

    first: int
    end: int
    total: int


class LayersDone(Struct, frozen=True, tag=True):
    """The KV of a step's first layers is complete, for requests whose KV is copied by layer.

    A worker reports it when such a step begins, with 0 layers, and as it proceeds; only of steps that end a prompt.
    """

    worker: WorkerId
    requests: tuple[tuple[RequestId, int], ...]
    """Ids with attempts."""
    layers: int


class LandingWanted(Struct, frozen=True, tag=True):
    """Grant blocks for a request's KV, which another host or a tier has."""

    request: Request
    attempt: int
    worker: WorkerId | None
    """The worker that goes on with the request. None: the KV is sent ahead. The pool then answers at once, with free
    blocks only: it preempts no request for it."""
    blocks: int
    prefix: tuple[BlockHash, ...]
    """Hashes of its leading full blocks: those that are here already are not copied."""
    first_block: int = 0
    """Leading blocks that lie behind the window of every layer: they are not copied."""


class LandingGranted(Struct, frozen=True, tag=True):
    """The blocks that a request's KV may be written into. The first `cached_blocks` need no copy."""

    host: HostId
    request_id: RequestId
    attempt: int
    block_table: tuple[BlockId, ...]
    cached_blocks: int


class LandingRefused(Struct, frozen=True, tag=True):
    """The pool has no free blocks for what is sent ahead."""

    host: HostId
    request_id: RequestId
    attempt: int


class LandingEnded(Struct, frozen=True, tag=True):
    """No transfer writes into the request's blocks any more."""

    request_id: RequestId
    computed_tokens: int
    """Leading tokens whose KV is in them now."""
    hashes: tuple[BlockHash, ...]
    """Hashes of its leading full blocks, which are sealed now."""


class LeaseWanted(Struct, frozen=True, tag=True):
    """Keep the request's blocks until LeaseEnded, whatever happens to the request: a mover is about to read them.

    A request that holds less here is given the cached blocks of its prefix.
    """

    request: Request
    prefix: tuple[BlockHash, ...]


class LeaseEnded(Struct, frozen=True, tag=True):
    """The mover no longer reads them."""

    request_id: RequestId


class CopyBlocks(Struct, frozen=True, tag=True):
    """Copy the KV of some of a request's tokens between two hosts.

    Each list begins with the block that holds the first of these tokens on its host. Where blocks of both have one
    size, `read[i]` goes into `write[i]`.
    """

    request_id: RequestId
    number: int
    """Differs from the number of every other copy of the cluster."""
    source: HostId
    target: HostId
    read: tuple[BlockId, ...]
    write: tuple[BlockId, ...]
    first_token: int
    """Position in the request of the first token that is copied: on the target, one that begins a block."""
    tokens: int
    """How many tokens' KV is copied."""
    layers: LayerSpan | None = None
    """Copy these layers only: the others are not computed yet, or were copied before. None: copy all."""

    @property
    def whole_tokens(self) -> int:
        """Return how many tokens over all layers have as many bytes as these layers of `tokens`."""
        span = self.layers
        return self.tokens if span is None else -(-self.tokens * (span.end - span.first) // span.total)


class CopyEnded(Struct, frozen=True, tag=True):
    """A copy is over: nothing reads its source or writes its target any more."""

    request_id: RequestId
    number: int
    landed: bool
    """False: it has failed, and the blocks at the target are not complete."""
