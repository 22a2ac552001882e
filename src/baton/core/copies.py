"""What is said while a request's KV goes from one host to another: to the two pools, and to what copies.

The blocks to land in are asked for first, then those to read are leased, then a wire copies, then both ends are told.
While a request is still computed, its sealed blocks may be sent ahead to where it will probably go on: there they are
cached under their names, held by nobody, and what follows later finds them.
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
    """Of the step under way, the KV of the first layers is complete, for requests that are sent ahead by layer.

    Said by a worker when such a step begins, with 0 layers, and as it gets on; only of steps that end a prompt.
    """

    worker: WorkerId
    requests: tuple[tuple[RequestId, int], ...]
    """With their attempts."""
    layers: int


class LandingWanted(Struct, frozen=True, tag=True):
    """A request's KV is to come over from another host: keep blocks for it, as many as are named here."""

    request: Request
    attempt: int
    worker: WorkerId | None
    """Who goes on with it when it has landed. None: it is sent ahead. Then the pool gives what it has to spare now, or
    nothing: it answers at once, and takes nobody's blocks for it."""
    blocks: int
    prefix: tuple[BlockHash, ...]
    """Hashes of its leading full blocks: what is here already need not come over."""
    first_block: int = 0
    """Leading blocks that nobody will look at: behind a window that all layers have. They do not come over."""


class LandingGranted(Struct, frozen=True, tag=True):
    """The blocks that a request's KV may be written into. The first `cached_blocks` hold it already, or need not."""

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
    """Nothing writes into the request's blocks from outside any more."""

    request_id: RequestId
    computed_tokens: int
    """Leading tokens whose KV is in them now."""
    hashes: tuple[BlockHash, ...]
    """Of its leading full blocks: they are sealed here."""


class LeaseWanted(Struct, frozen=True, tag=True):
    """A wire is about to read the request's blocks: they stay, whatever happens to the request, until LeaseEnded.

    Where the request holds less here, it is given the cached blocks of its prefix.
    """

    request: Request
    prefix: tuple[BlockHash, ...]


class LeaseEnded(Struct, frozen=True, tag=True):
    """The wire no longer reads them."""

    request_id: RequestId


class CopyBlocks(Struct, frozen=True, tag=True):
    """Copy the KV of some of a request's tokens between two hosts.

    Each list begins with the block that holds the first of these tokens on its host. Where blocks of both have one
    size, `read[i]` goes into `write[i]`.
    """

    request_id: RequestId
    number: int
    """Tells this copy from every other of the cluster."""
    source: HostId
    target: HostId
    read: tuple[BlockId, ...]
    write: tuple[BlockId, ...]
    first_token: int
    """Position in the request of the first token that is copied: on the target, one that begins a block."""
    tokens: int
    """How many tokens' KV is copied."""
    layers: LayerSpan | None = None
    """Copy of these layers only: the others are not computed yet, or were copied before. None: of all."""

    @property
    def whole_tokens(self) -> int:
        """Over all layers, so many tokens have as many bytes as these layers of `tokens` have."""
        span = self.layers
        return self.tokens if span is None else -(-self.tokens * (span.end - span.first) // span.total)


class CopyEnded(Struct, frozen=True, tag=True):
    """A copy is over: nothing reads its source or writes its target any more."""

    request_id: RequestId
    number: int
    landed: bool
    """False: it has failed, and the blocks at the target are not complete."""
