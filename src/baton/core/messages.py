"""Everything that is said between the coordinator, the host pools and the workers. Plain data: logged, replayed, sent.

An *event* reports what happened, a *command* tells what to do. All that speaks of work carries (request_id, attempt),
by which outdated events are recognized. Frozen data has no cycles: frequent messages skip the collector (`gc=False`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.core.copies import LandingEnded, LandingGranted, LandingRefused, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.prefixes import BlocksRemoved, BlocksStored
from baton.core.ticking import Tick, WaitedTooLong
from baton.core.tier_messages import ReadBack, ReadBackWanted, TierCommand, TierEvent
from baton.core.types import (
    BlockHash,
    BlockId,
    FinishReason,
    HostId,
    OutputToken,
    Request,
    RequestId,
    Role,
    TierHit,
    TokenBytes,
    Until,
    WorkerId,
    WorkerView,
)

Outcome = Literal["finished", "rejected", "failed", "cancelled"]
RejectReason = Literal["queue_full", "no_worker", "too_long", "slo", "share", "shutdown"]

# ---- into the coordinator ----------------------------------------------------------------------------------------


class RequestArrived(Struct, frozen=True, tag=True, gc=False):
    request: Request
    tier_hits: dict[HostId, tuple[TierHit, ...]] = {}
    """See `ClusterView.tier_hits`."""


class RequestCancelled(Struct, frozen=True, tag=True):
    """The client is gone, or has what it needs (a stop string was met)."""

    request_id: RequestId


class WorkerJoined(Struct, frozen=True, tag=True):
    view: WorkerView


class WorkerLost(Struct, frozen=True, tag=True):
    """A worker is certainly dead, or was asked for and will not come: it touches no block. Its pool is told too."""

    worker: WorkerId
    reason: str


class HostLost(Struct, frozen=True, tag=True):
    """A host is gone, with its KV and all its workers. Nothing that it held can be read any more."""

    host: HostId
    reason: str


class WorkerReported(Struct, frozen=True, tag=True, gc=False):
    view: WorkerView


class RoleSet(Struct, frozen=True, tag=True):
    worker: WorkerId
    role: Role


class PrefillFinished(Struct, frozen=True, tag=True, gc=False):
    """The first token is out, or left to another worker, and this one no longer touches the request's blocks."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    computed_tokens: int
    """Leading tokens whose KV lies in the request's blocks: the next worker starts there."""


class DecodeBegun(Struct, frozen=True, tag=True, gc=False):
    """The first token is out, and the worker goes on with the request: from now on it is one that may move."""

    request_id: RequestId
    attempt: int
    worker: WorkerId


class RequestFinished(Struct, frozen=True, tag=True, gc=False):
    """The last token is out and the worker no longer touches the request's blocks."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    reason: FinishReason
    output_tokens: int = 0
    """How long the answer is, prompt not counted: what predictions of lengths learn from."""


class RequestFailed(Struct, frozen=True, tag=True):
    """The engine cannot compute this request, though it can compute others. The worker no longer touches its blocks."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    reason: str


class AheadEnded(Struct, frozen=True, tag=True):
    """The sealed blocks of a running request are where `SendAhead` wanted them, or will not get there."""

    request_id: RequestId
    attempt: int
    landed: bool
    """False: the wire failed, or there was no room."""


# ---- out of the coordinator --------------------------------------------------------------------------------------


class StartPrefill(Struct, frozen=True, tag=True, gc=False):
    """Compute the prompt on this worker: all but its last token, up to the first token, or (mixed) to the end."""

    request: Request
    attempt: int
    worker: WorkerId
    until: Until
    fetch: HostId | None = None
    """Host whose longer prefix is pulled first."""
    read_tokens: int = 0
    """Leading tokens that shall be in the arena first, read from the tiers of the worker's host. 0: read nothing."""
    layer_groups: int = 1
    """Groups of layers in which the last chunk's KV is sent ahead while it is computed. 1: not before it is."""


class StartDecode(Struct, frozen=True, tag=True, gc=False):
    """Go on with the request on this worker, from the blocks and tokens that exist. Also after a worker's death."""

    request: Request
    attempt: int
    worker: WorkerId
    source: HostId | None = None
    """Another host, which holds the request's KV: it has to come over first. None: it is here, or nowhere."""


class SendAhead(Struct, frozen=True, tag=True):
    """Bring the request's sealed blocks to this worker's host while it runs where it is: it will probably go on there.

    A wish: where the wire fails or there is no room, the rest comes over when the request does. Ends with its attempt.
    """

    request: Request
    attempt: int
    source: HostId
    worker: WorkerId
    run_tokens: int = 1
    """Shortest run that is sent: less waits for more."""
    report: bool = False
    """Answer AheadEnded when no more than a little is missing, and send nothing more then."""


class StopRequest(Struct, frozen=True, tag=True):
    """Tell the worker to drop the request between two steps. It answers RequestDropped."""

    request_id: RequestId
    attempt: int
    worker: WorkerId


class ReleaseBlocks(Struct, frozen=True, tag=True, gc=False):
    """This request is over here: the pool frees its blocks as soon as no worker can touch them."""

    request_id: RequestId


class CloseRequest(Struct, frozen=True, tag=True, gc=False):
    """The request is over. Exactly one per request, whatever happened to it (INV-1)."""

    request_id: RequestId
    outcome: Outcome
    reason: str = ""
    reject: RejectReason | None = None
    retry_after_s: float | None = None


class SetRole(Struct, frozen=True, tag=True):
    """The coordinator has given the worker another role: from the next request on."""

    worker: WorkerId
    role: Role


class StartWorker(Struct, frozen=True, tag=True):
    """Start one more worker under this name, which no other has had. Answered by WorkerJoined or WorkerLost."""

    worker: WorkerId
    role: Role


class RetireWorker(Struct, frozen=True, tag=True):
    """End this worker: it has no request any more and is given none. Its loss is then no death."""

    worker: WorkerId


CoordinatorCommand = (
    StartPrefill
    | StartDecode
    | SendAhead
    | StopRequest
    | ReleaseBlocks
    | CloseRequest
    | SetRole
    | StartWorker
    | RetireWorker
)

# ---- between a worker's batcher and its host pool ------------------------------------------------------------------


class BlocksWanted(Struct, frozen=True, tag=True, gc=False):
    """The batcher asks for a request's first blocks (with the prefix that the host holds) or for more of them.

    `blocks` is how long the request's block table shall be in all; asking twice for the same length is harmless.
    """

    request_id: RequestId
    attempt: int
    worker: WorkerId
    blocks: int
    prefix: tuple[BlockHash, ...] = ()
    """Hashes that may be taken as a prefix hit. Only looked at while the request holds no block."""


class BlocksGranted(Struct, frozen=True, tag=True, gc=False):
    """The request's whole block table. The first `cached_blocks` hold KV that need not be computed."""

    request_id: RequestId
    attempt: int
    block_table: tuple[BlockId, ...]
    cached_blocks: int


class BlocksSealed(Struct, frozen=True, tag=True, gc=False):
    """The KV of blocks `first` .. of the request's table is complete and now immutable; their hashes in order."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    first: int
    hashes: tuple[BlockHash, ...]


class RequestDropped(Struct, frozen=True, tag=True, gc=False):
    """The worker no longer touches the request's blocks: it was told to stop, or (preempted) gave them back."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    preempted: bool
    """True: the request goes on later, from whatever prefix is then still cached."""
    computed_tokens: int = 0
    """Not preempted: leading tokens whose KV the worker vouches for, the unsealed tail included."""


class PreemptRequest(Struct, frozen=True, tag=True):
    """The pool is short of blocks: the batcher shall drop this request's blocks and queue it again."""

    request_id: RequestId
    attempt: int


CoordinatorEvent = (
    RequestArrived
    | RequestCancelled
    | WorkerJoined
    | WorkerLost
    | HostLost
    | WorkerReported
    | RoleSet
    | Tick
    | WaitedTooLong
    | PrefillFinished
    | DecodeBegun
    | RequestFinished
    | RequestFailed
    | RequestDropped
    | AheadEnded
    | BlocksStored
    | BlocksRemoved
)

PoolEvent = (
    StartPrefill
    | StartDecode
    | BlocksWanted
    | BlocksSealed
    | RequestDropped
    | PrefillFinished
    | RequestFinished
    | RequestFailed
    | ReleaseBlocks
    | LandingWanted
    | LandingEnded
    | LeaseWanted
    | LeaseEnded
    | TierEvent
    | ReadBack
    | WorkerLost
)


class ToWorker(Struct, frozen=True, tag=True, gc=False):
    """A command with its address. A dead worker gets none: its loss is an event of its own."""

    worker: WorkerId
    command: BlocksGranted | PreemptRequest | StopRequest


PoolCommand = ToWorker | BlocksStored | BlocksRemoved | LandingGranted | LandingRefused | TierCommand | ReadBackWanted

# ---- between the server and a worker -------------------------------------------------------------------------------


class StartRequest(Struct, frozen=True, tag=True, gc=False):
    """StartPrefill or StartDecode as a worker sees it: with the tokens, and the block table where one exists."""

    request: Request
    attempt: int
    tokens: TokenBytes
    """Prompt and the output so far."""
    until: Until
    block_table: tuple[BlockId, ...] = ()
    """Blocks that the request already holds on this host: the handoff itself. Empty: ask the pool."""
    computed_tokens: int = 0
    """Leading tokens whose KV lies in the block table."""
    layer_groups: int = 1


class Shutdown(Struct, frozen=True, tag=True):
    """End after this step."""


WorkerCommand = StartRequest | StopRequest | BlocksGranted | PreemptRequest | Shutdown
BatcherEvent = BlocksWanted | BlocksSealed | RequestDropped | PrefillFinished | RequestFinished | RequestFailed


class StepReport(Struct, frozen=True, tag=True, gc=False):
    """All that a worker has to say after a step (or between two, with no tokens): one message."""

    worker: WorkerId
    tokens: tuple[OutputToken, ...]
    events: tuple[BatcherEvent, ...]
    """In the order in which they happened."""
    view: WorkerView
    step_s: float = 0.0
    """How long the forward pass took. 0 where there was none."""
    started: tuple[RequestId, ...] = ()
    """Requests without a token of which this step computed the first slice on this worker: when it began, their queue
    time ended."""
    drafted_tokens: int = 0
    """Guesses that the step verified."""
    accepted_tokens: int = 0
    """Those that came true: tokens without a step of their own."""
    is_load_new: bool = True
    """False: since the last report every request only decoded on. The coordinator foresees that, and is not told."""


class WorkerReady(Struct, frozen=True, tag=True):
    """The worker has mapped the arena, loaded the model and warmed up."""

    worker: WorkerId
    pid: int


class WorkerProgress(Struct, frozen=True, tag=True):
    """Progress of a starting worker, for the console."""

    worker: WorkerId
    text: str


class WorkerFailed(Struct, frozen=True, tag=True):
    """The worker cannot go on; it ends after this message."""

    worker: WorkerId
    reason: str
