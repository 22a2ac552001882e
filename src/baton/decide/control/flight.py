"""The control state of one request, from its arrival to its close."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton.core.types import HostId, Prediction, Request, RequestId, TierHit, Until, WorkerId

Stage = Literal["prefill", "decode"]


@dataclass(slots=True)
class Flight:
    """The control state of one request: its attempt, its stage and its worker."""

    request: Request
    key: tuple[float, ...] = ()
    """Order among waiting flights."""
    tier_hits: dict[HostId, tuple[TierHit, ...]] = field(default_factory=dict[HostId, tuple[TierHit, ...]])
    """As `ClusterView.tier_hits`, at the request's arrival."""
    attempt: int = 1
    deaths: int = 0
    """Number of workers that died while they ran the request. Workers of lost hosts are not counted."""
    deaths_alone: int = 0
    """Number of these workers that ran no other request when they died."""
    started_at_s: float = 0.0
    moving_to: WorkerId | None = None
    """Target of a move. The request goes there after its KV was sent ahead and its current worker has stopped."""
    ahead: HostId | None = None
    """Host to which its blocks are sent while its prompt is computed."""
    stage: Stage = "prefill"
    worker: WorkerId | None = None
    """None while the request waits."""
    host: HostId | None = None
    """Host that has its KV. None: no host has any."""
    is_paused: bool = False
    """Its worker was told to drop it: its place is reserved for another class. It waits for its turn again."""
    queued_tokens: int = 0
    """Prompt tokens that were assigned to its worker and are not known to be computed."""
    until: Until = "end"
    """How far the worker of its prompt runs it."""
    predicted: Prediction | None = None
    """Predicted when its prompt was assigned."""
    routed_at_s: float = 0.0
    """When its prompt was assigned to a worker."""
    first_token_s: float | None = None


def in_order(flight: Flight) -> tuple[tuple[float, ...], RequestId]:
    """Return the sort key of a waiting flight: the fairness key, then the id."""
    return (flight.key, flight.request.id)
