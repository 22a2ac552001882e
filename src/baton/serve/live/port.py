"""What the HTTP half of the server asks of the half that drives workers. Two files meet here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from baton.compute.models.card import ModelCard
from baton.core.messages import Outcome, RejectReason
from baton.core.types import FinishReason, OutputToken, Request, Role, WorkerId
from baton.serve.messages.hosting import HostTerms


class Timings(Struct, frozen=True, kw_only=True):
    """Where a request's time went; in every response. Seconds; None where it has not happened (or never will)."""

    queue_s: float | None = None
    """Arrival to the first slice in a step of the first worker."""
    prefill_s: float | None = None
    """That to the first token leaving the first worker; where that is left to decode: to the end of its prompt."""
    handoff_s: float | None = None
    """That to the request standing in a batch of the decode worker. None: there was no handoff."""
    first_decode_s: float | None = None
    """That end to the first token that decode makes: the second one, or where it was left to decode, the first."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    prefill_worker: str | None = None
    decode_worker: str | None = None
    attempts: int = 1
    """One more than the workers that were lost under it."""
    moves: int | UnsetType = UNSET
    """How often a policy moved it to another worker while it decoded. Left out where none did."""
    preemptions: int | UnsetType = UNSET
    """How often it gave its KV blocks to older requests and waited for others. Left out where it never did."""
    kv_loss: str | UnsetType = UNSET
    """What its KV lost by going to a host of another precision. Left out where it lost nothing."""


class Finish(Struct, frozen=True, kw_only=True):
    """How a generation ended."""

    outcome: Outcome
    reason: FinishReason | None = None
    """Where the outcome is `finished`. `stop`: the last token is a stop token, and not part of the text."""
    message: str = ""
    """Where it is not: what happened and what to do, for the client."""
    reject: RejectReason | None = None
    retry_after_s: float | None = None


class Update(Struct, frozen=True, kw_only=True):
    """What is new since the last update: tokens in order, and the end if it has come."""

    tokens: tuple[OutputToken, ...] = ()
    finish: Finish | None = None


class Generation(Protocol):
    """One request that is being answered."""

    async def next(self) -> Update:
        """Wait for news. A slow reader gets several steps' tokens in one update. Never called after a finish."""
        ...

    def stop(self) -> None:
        """End it as finished: the client has all it asked for (a stop string was met). Idempotent."""
        ...

    def cancel(self) -> None:
        """End it as cancelled: the client is gone. Idempotent, harmless after the end."""
        ...

    def mark_sent(self, tokens: int) -> None:
        """Note that text of this many more tokens reached the client's socket: TTFT and TPOT are measured here."""
        ...

    def timings(self) -> Timings: ...


class WorkerStatus(Struct, frozen=True, kw_only=True):
    """One line of `/cluster`."""

    id: str
    role: Role
    pid: int
    state: str
    """`starting`, `ready` or `lost`."""
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    host: str = ""
    """The host that it runs on."""


class TierStatus(Struct, frozen=True, kw_only=True):
    """A tier below a host's arena."""

    name: str
    state: str = "used"
    """`used`, or `left alone` by this host: its store failed or hung again and again, or could not be opened yet."""
    kv_blocks_total: int
    """Where the other side decides how many it keeps: as many as are known to be there."""
    kv_blocks_cached: int
    kv_blocks_writing: int
    loaded_blocks: int
    """Read since the host is there."""
    missed_blocks: int
    """They were to be read, and were not there."""
    latency_s: float
    """As measured: until the first block of a read is there,"""
    block_load_s: float
    """and what each adds."""


class HostStatus(Struct, frozen=True, kw_only=True):
    id: str
    address: str = ""
    """Where other hosts get KV blocks from it. Empty: nowhere, it is the only one."""
    state: str = "ready"
    """`starting` or `ready`: some worker of it takes requests. A host that is lost is not listed."""
    workers: tuple[str, ...] = ()
    """Ids of those that run on it."""
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_block_tokens: int
    kv_block_bytes: int
    tiers: tuple[TierStatus, ...] = ()
    """Below its arena, the fastest first."""


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The body of `/cluster`."""

    workers: tuple[WorkerStatus, ...]
    hosts: tuple[HostStatus, ...]
    policy: dict[str, str]
    """Family to `module:Class`."""


@dataclass(frozen=True, slots=True)
class KeptLog:
    """The file that every decision is written to."""

    path: Path
    is_full: bool
    """Later decisions are not in it."""


class Gateway(Protocol):
    """The cluster as one object: what the HTTP half talks to."""

    card: ModelCard

    @property
    def request_tokens_max(self) -> int:
        """Most tokens that one request may have: the smaller of the model's context and the whole KV cache."""
        ...

    @property
    def state(self) -> str:
        """`loading`, `ready`, `deserted` (every host that had joined is gone), `stopping`, or `failed: <why>`.

        `/health` is 200 only when ready.
        """
        ...

    def awaited(self) -> str:
        """Name what has to come until it is ready, as in `decode-0 to load the model`. Empty: nothing that is known."""
        ...

    def submit(self, request: Request, prompt: Sequence[int]) -> Generation:
        """Take a request whose limits were checked. Refusals are finishes, never exceptions."""
        ...

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change a worker's role at once. Raises RequestError (404) for an unknown worker."""
        ...

    def cluster(self) -> ClusterStatus: ...

    @property
    def decision_log(self) -> KeptLog | None:
        """None: decisions are not written."""
        ...

    async def host_terms(self) -> HostTerms:
        """Say what a host needs to join the cluster. Raises RequestError where none can."""
        ...
