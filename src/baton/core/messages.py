"""Messages between the coordinator, the host pools and the workers: plain data that is logged, replayed and sent.

An *event* reports what happened, a *command* says what to do. Messages about a request carry (request_id, attempt), so
that late events of an abandoned attempt are recognized. Frequent messages are not tracked by Python's garbage collector
(`gc=False`): frozen data has no cycles.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.core.copies import LandingEnded, LandingGranted, LandingRefused, LandingWanted, LeaseEnded, LeaseWanted
from baton.core.leaving import RestartWorker
from baton.core.prefixes import BlocksRemoved, BlocksStored, EngineCacheChanged
from baton.core.spill import BlocksSpilled, SpillBlocks
from baton.core.ticking import DriverEvent
from baton.core.tier_messages import ReadBack, ReadBackWanted, TierCommand, TierEvent
from baton.core.types import (
    BlockHash,
    BlockId,
    FinishReason,
    HostId,
    OutputToken,
    Prediction,
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
RejectReason = Literal["queue_full", "queue_deadline", "no_worker", "too_long", "slo", "share", "shutdown", "retries"]

# ---- events of the coordinator -----------------------------------------------------------------------------------


class RequestArrived(Struct, frozen=True, tag=True, gc=False):
    request: Request
    tier_hits: dict[HostId, tuple[TierHit, ...]] = {}


class RequestCancelled(Struct, frozen=True, tag=True):
    """The client has disconnected, or a stop string has ended its text."""

    request_id: RequestId


class WorkerJoined(Struct, frozen=True, tag=True):
    view: WorkerView


class WorkerLost(Struct, frozen=True, tag=True):
    """A worker is dead or will not start, so it touches no block any more. Its host's pool gets the event too."""

    worker: WorkerId
    reason: str


class HostLost(Struct, frozen=True, tag=True):
    """A host is lost, with all its workers. Its KV cannot be read any more."""

    host: HostId
    reason: str


class WorkerReported(Struct, frozen=True, tag=True, gc=False):
    view: WorkerView


class RoleSet(Struct, frozen=True, tag=True):
    worker: WorkerId
    role: Role


class PrefillFinished(Struct, frozen=True, tag=True, gc=False):
    """The worker no longer touches the request's blocks. The first token is sent, or left to the decode worker."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    computed_tokens: int
    """Leading tokens whose KV is in the request's blocks. The next worker starts after them."""


class DecodeBegun(Struct, frozen=True, tag=True, gc=False):
    """The worker has sent the first token and decodes the request. From now on policies may move it."""

    request_id: RequestId
    attempt: int
    worker: WorkerId


class RequestFinished(Struct, frozen=True, tag=True, gc=False):
    """The worker has sent the last token and no longer touches the request's blocks."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    reason: FinishReason
    output_tokens: int = 0
    """Length of the answer. Predictions of output lengths learn from it."""


class RequestFailed(Struct, frozen=True, tag=True):
    """The engine cannot compute this request, but can compute others. The worker no longer touches its blocks."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    reason: str


class AheadEnded(Struct, frozen=True, tag=True):
    """A `SendAhead` has ended: the request's sealed blocks are at the target host, or were given up."""

    request_id: RequestId
    attempt: int
    landed: bool
    """False: a copy failed, or the target had no room."""


# ---- commands of the coordinator ---------------------------------------------------------------------------------


class StartPrefill(Struct, frozen=True, tag=True, gc=False):
    """Start the request on this worker with its prompt. `until`: how far the worker runs it."""

    request: Request
    attempt: int
    worker: WorkerId
    until: Until
    fetch: HostId | None = None
    """Host with a longer prefix hit, whose blocks are copied before the start. None: no copy."""
    read_tokens: int = 0
    """Leading tokens to have in the arena before the start, read from the tiers of the worker's host. 0: no read."""
    layer_groups: int = 1
    """Groups of layers in which the last chunk's KV is sent ahead during its step. 1: it is sent after the step."""
    predicted: Prediction | None = None


class StartDecode(Struct, frozen=True, tag=True, gc=False):
    """Continue the request on this worker with its existing blocks and tokens, also after the death of a worker."""

    request: Request
    attempt: int
    worker: WorkerId
    source: HostId | None = None
    """Host from which the request's KV is copied first. None: the KV is on the worker's host, or no host has it."""


class SendAhead(Struct, frozen=True, tag=True):
    """Copy the sealed blocks of a running request to the host of the worker that will probably continue it.

    It is best effort: after a failure or without room, the handoff copies the rest. It ends with the attempt.
    """

    request: Request
    attempt: int
    source: HostId
    worker: WorkerId
    run_tokens: int = 1
    """Minimum length of a run to send. Shorter runs wait for further tokens."""
    report: bool = False
    """Stop sending and report AheadEnded once little KV is missing at the target."""


class StopRequest(Struct, frozen=True, tag=True):
    """Drop the request between two steps; if `only_unstarted`, only if no step has run it. RequestDropped answers."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    only_unstarted: bool = False


class ReleaseBlocks(Struct, frozen=True, tag=True, gc=False):
    """The request no longer needs its blocks on this host: the pool frees them once no worker can touch them."""

    request_id: RequestId


class CloseRequest(Struct, frozen=True, tag=True, gc=False):
    """The request has ended. There is exactly one for every request (INV-1)."""

    request_id: RequestId
    outcome: Outcome
    reason: str = ""
    reject: RejectReason | None = None
    retry_after_s: float | None = None


class SetRole(Struct, frozen=True, tag=True):
    """Change the worker's role, from the next request on. `reason`: why, in words, if the policy says it."""

    worker: WorkerId
    role: Role
    reason: str = ""


class StartWorker(Struct, frozen=True, tag=True):
    """Start a worker under a new, unique name. WorkerJoined or WorkerLost answers. No host: the driver chooses one."""

    worker: WorkerId
    role: Role
    host: HostId = HostId("")


class RetireWorker(Struct, frozen=True, tag=True):
    """End this idle worker, which gets no further requests. Its loss does not count as a death."""

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
    | RestartWorker
)

# ---- between a worker's batcher and its host pool ------------------------------------------------------------------


class BlocksWanted(Struct, frozen=True, tag=True, gc=False):
    """A batcher asks for a request's first blocks, with a prefix hit, or for further ones. It may ask repeatedly."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    blocks: int
    """Length of the whole block table."""
    prefix: tuple[BlockHash, ...] = ()
    """Hashes that may be used as a prefix hit. Ignored if the request holds blocks already."""


class BlocksGranted(Struct, frozen=True, tag=True, gc=False):
    """The request's whole block table. The first `cached_blocks` hold KV that need not be computed."""

    request_id: RequestId
    attempt: int
    block_table: tuple[BlockId, ...]
    cached_blocks: int


class BlocksSealed(Struct, frozen=True, tag=True, gc=False):
    """The blocks of the table from index `first` on are full and immutable now. `hashes` has their hashes, in order."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    first: int
    hashes: tuple[BlockHash, ...]


class RequestDropped(Struct, frozen=True, tag=True, gc=False):
    """The worker no longer touches the request's blocks, after a stop or a preemption."""

    request_id: RequestId
    attempt: int
    worker: WorkerId
    preempted: bool
    """True: the worker has queued the request again. It continues from the prefix that is still cached then."""
    computed_tokens: int = 0
    """After a stop: leading tokens whose KV is valid, including the unsealed tail."""


class PreemptRequest(Struct, frozen=True, tag=True):
    """Give back this request's blocks and queue it again, because the pool is short of blocks."""

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
    | DriverEvent
    | PrefillFinished
    | DecodeBegun
    | RequestFinished
    | RequestFailed
    | RequestDropped
    | AheadEnded
    | BlocksStored
    | BlocksRemoved
)

BatcherEvent = (
    BlocksWanted | BlocksSealed | BlocksSpilled | RequestDropped | PrefillFinished | RequestFinished | RequestFailed
)

PoolEvent = (
    StartPrefill
    | StartDecode
    | BatcherEvent
    | ReleaseBlocks
    | LandingWanted
    | LandingEnded
    | LeaseWanted
    | LeaseEnded
    | EngineCacheChanged
    | TierEvent
    | ReadBack
    | WorkerLost
)


class ToWorker(Struct, frozen=True, tag=True, gc=False):
    """A command for a worker. It is dropped if the worker is dead: WorkerLost reports that separately."""

    worker: WorkerId
    command: BlocksGranted | PreemptRequest | SpillBlocks | StopRequest


PoolCommand = ToWorker | BlocksStored | BlocksRemoved | LandingGranted | LandingRefused | TierCommand | ReadBackWanted

# ---- between the server and a worker -------------------------------------------------------------------------------


class StartRequest(Struct, frozen=True, tag=True, gc=False):
    """StartPrefill or StartDecode in the form that the worker gets: with the tokens, and the block table if any."""

    request: Request
    attempt: int
    tokens: TokenBytes
    """Prompt and output so far."""
    until: Until
    block_table: tuple[BlockId, ...] = ()
    """Blocks that the request holds on this host, for a handoff. Empty: the worker asks the pool for blocks."""
    computed_tokens: int = 0
    """Leading tokens whose KV is in the block table."""
    layer_groups: int = 1


class Shutdown(Struct, frozen=True, tag=True):
    """End the process after the current step."""


WorkerCommand = StartRequest | StopRequest | BlocksGranted | PreemptRequest | SpillBlocks | Shutdown


class StepReport(Struct, frozen=True, tag=True, gc=False):
    """The report of a worker after a step, or between two steps (then without tokens)."""

    worker: WorkerId
    tokens: tuple[OutputToken, ...]
    events: tuple[BatcherEvent, ...]
    """In the order in which they happened."""
    view: WorkerView
    step_s: float = 0.0
    """Duration of the forward pass. 0: there was none."""
    started: tuple[RequestId, ...] = ()
    """Requests without output whose first slice on this worker was in this step. Their queue time ends with it."""
    drafted_tokens: int = 0
    """Draft tokens that the step verified."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted: output tokens without a step of their own."""
    is_load_new: bool = True
    """False: every request has only decoded since the last report. The coordinator predicts that load itself."""


class WorkerReady(Struct, frozen=True, tag=True):
    """The worker has mapped the arena, loaded the model and warmed up."""

    worker: WorkerId
    pid: int
    attention_backend: str = ""
    """Empty: its engine has no attention."""


class WorkerProgress(Struct, frozen=True, tag=True):
    """Progress of a starting worker, for the console."""

    worker: WorkerId
    text: str


class WorkerFailed(Struct, frozen=True, tag=True):
    """The worker has failed; it ends after this message."""

    worker: WorkerId
    reason: str
