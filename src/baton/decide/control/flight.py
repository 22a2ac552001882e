"""The control state of one request, from its arrival to its close."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton.core.types import HostId, Request, TierHit, WorkerId

Stage = Literal["prefill", "decode"]


@dataclass(slots=True)
class Flight:
    """The control state of one request: its attempt, its stage and its worker."""

    request: Request
    key: tuple[float, ...] = ()
    """Order among waiting flights."""
    tier_hits: dict[HostId, tuple[TierHit, ...]] = field(default_factory=dict[HostId, tuple[TierHit, ...]])
    """See `ClusterView.tier_hits`: as it was when the request arrived."""
    attempt: int = 1
    deaths: int = 0
    """Workers that died under it."""
    started_at_s: float = 0.0
    moving_to: WorkerId | None = None
    """The worker that it moves to, once its KV was sent ahead and its worker has stopped."""
    ahead: HostId | None = None
    """Where its blocks are sent while its prompt is computed."""
    stage: Stage = "prefill"
    worker: WorkerId | None = None
    """None while it waits in the room for a worker."""
    host: HostId | None = None
    """Where its KV is, if anywhere."""
    queued_tokens: int = 0
    """Prompt tokens that its worker was given and has, as far as known, not computed."""
