"""The ways by which KV can change hosts: what each is predicted to cost, the question which, and its answer."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from baton.core.types import Request

Way = Literal["direct", "central"]
"""Direct: the target pulls from the source. Central: the source puts blocks into a tier that both have, and the target
takes them from there; what is no full block, it computes again."""


class RoadView(Struct, frozen=True, kw_only=True):
    """One stretch of the way, as the server has measured it."""

    expected_s: float
    """Predicted for this KV, behind what is under way there now."""
    is_measured: bool
    """False: predicted from what is configured alone."""
    failed_ago_s: float = math.inf
    """How long ago something failed on it, if nothing has succeeded since."""


class HandoffView(Struct, frozen=True, kw_only=True):
    """A request whose KV has to change hosts, and what each way is predicted to cost."""

    request: Request
    tokens: int
    """Whose KV has to get there."""
    pooled_tokens: int
    """Of those, the leading ones that the pool has anyway."""
    direct: RoadView
    put: RoadView
    """From the source into the pool, of what it does not have. 0 seconds where it has all."""
    get: RoadView
    """From the pool to the target."""
    run_ratio: float
    """Share of it that is put or taken at once: a run is taken while the next one is put."""
    rest_s: float
    """Computing what is no full block, which the pool does not take."""


class WayChosen(Struct, frozen=True, tag=True):
    """The policy has chosen a path for a request's KV, between hosts that share a tier."""

    handoff: HandoffView
    way: Way
