"""Paths by which KV changes hosts: the predicted cost of each, and the choice of a policy."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from baton.core.types import Request

Way = Literal["direct", "central"]
"""Direct: the target copies from the source. Central: the source writes blocks into a tier that both have, and the
target reads them there; tokens that fill no block are computed again."""


class LinkView(Struct, frozen=True, kw_only=True):
    """One link of a path, as the server has measured it."""

    expected_s: float
    """Predicted time for this KV, behind the KV that is under way there now."""
    is_measured: bool
    """False: predicted from the configuration alone."""
    failed_ago_s: float = math.inf
    """Time since the last failure on it, if nothing has succeeded since."""


class HandoffView(Struct, frozen=True, kw_only=True):
    """A request whose KV has to change hosts, and the predicted cost of each path."""

    request: Request
    tokens: int
    """Tokens whose KV the target lacks."""
    pooled_tokens: int
    """Leading ones of those whose KV the pool has already."""
    direct: LinkView
    put: LinkView
    """From the source into the pool, for the KV that it lacks. 0 seconds if it has everything."""
    get: LinkView
    """From the pool to the target."""
    run_ratio: float
    """Share of the KV that is put or read at once: a run is read while the next one is put."""
    rest_s: float
    """Time to compute the tokens that fill no block, which the pool does not take."""


class WayChosen(Struct, frozen=True, tag=True):
    """The policy has chosen a path for a request's KV, between hosts that share a tier."""

    handoff: HandoffView
    way: Way
