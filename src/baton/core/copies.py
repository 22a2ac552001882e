"""Events and commands of a KV transfer between two hosts, exchanged with both host pools and the mover processes.

A transfer asks the target's pool for blocks, leases the source's blocks, copies, and notifies both pools. While a
prompt is computed, its sealed blocks may be sent ahead to the host that will probably continue the request. There they
are cached without belonging to a request, and a later transfer reuses them.
"""

from __future__ import annotations

from msgspec import Struct

from baton.core.types import BlockHash, BlockId, HostId, Request, RequestId, WorkerId


class LayerSpan(Struct, frozen=True, array_like=True):
    """Layers `first` to `end - 1` of a model with `total` layers."""

    first: int
    end: int
    total: int


class LayersDone(Struct, frozen=True, tag=True):
    """The KV of a step's first `layers` layers is complete, for requests whose KV is copied by layer.

    A worker sends it in a step that ends a prompt: at the start of the step with 0 layers, then as layers finish.
    """

    worker: WorkerId
    requests: tuple[tuple[RequestId, int], ...]
    """Request ids with their attempts."""
    layers: int


class LandingWanted(Struct, frozen=True, tag=True):
    """Ask a pool for blocks to land in: another host or a tier has the request's KV."""

    request: Request
    attempt: int
    worker: WorkerId | None
    """The worker that continues the request. None: the KV is sent ahead. The pool then answers at once: it grants free
    blocks only, and preempts no request."""
    blocks: int
    prefix: tuple[BlockHash, ...]
    """Hashes of the leading full blocks. Blocks that the host holds already are not copied."""
    first_block: int = 0
    """Number of leading blocks behind the attention window, which are not copied."""


class LandingGranted(Struct, frozen=True, tag=True):
    """The blocks that a request's KV may be written into. The first `cached_blocks` need no copy."""

    host: HostId
    request_id: RequestId
    attempt: int
    block_table: tuple[BlockId, ...]
    cached_blocks: int


class LandingRefused(Struct, frozen=True, tag=True):
    """The pool has no free blocks for KV that is sent ahead."""

    host: HostId
    request_id: RequestId
    attempt: int


class LandingEnded(Struct, frozen=True, tag=True):
    """No transfer writes into the request's blocks any more."""

    request_id: RequestId
    computed_tokens: int
    """Leading tokens whose KV is in the blocks now."""
    hashes: tuple[BlockHash, ...]
    """Hashes of the leading full blocks, which are sealed now."""


class LeaseWanted(Struct, frozen=True, tag=True):
    """Keep the request's blocks until LeaseEnded, even if the request ends: a mover is about to read them.

    If more blocks of its prefix are cached on this host than it holds, the pool pins those instead.
    """

    request: Request
    prefix: tuple[BlockHash, ...]


class LeaseEnded(Struct, frozen=True, tag=True):
    """The mover no longer reads the leased blocks."""

    request_id: RequestId


class CopyBlocks(Struct, frozen=True, tag=True):
    """Copy the KV of some tokens of a request between two hosts.

    `read` and `write` begin with the block that holds `first_token`. If both hosts have the same block size, `read[i]`
    is copied into `write[i]`.
    """

    request_id: RequestId
    number: int
    """Unique among all copies of the cluster."""
    source: HostId
    target: HostId
    read: tuple[BlockId, ...]
    write: tuple[BlockId, ...]
    first_token: int
    """Position of the first token to copy. On the target, it begins a block."""
    tokens: int
    """Number of tokens to copy."""
    layers: LayerSpan | None = None
    """Copy only these layers, because the others are not computed yet or were copied before. None: all layers."""

    @property
    def whole_tokens(self) -> int:
        """Return the size of this copy for time estimates, in tokens with KV in all layers."""
        span = self.layers
        return self.tokens if span is None else -(-self.tokens * (span.end - span.first) // span.total)


class CopyEnded(Struct, frozen=True, tag=True):
    """A copy has ended: no process reads its source or writes its target any more."""

    request_id: RequestId
    number: int
    landed: bool
    """False: the copy has failed, and the target's blocks are incomplete."""
