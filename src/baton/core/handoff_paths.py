"""The paths on which KV can move between hosts, with predicted costs, for the handoff policy."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from baton.core.types import Request

HandoffPath = Literal["direct", "central"]
"""`direct`: the target copies from the source. `central`: the source writes blocks into a tier that both hosts have,
and the target reads them there; tokens that fill no block are recomputed."""


class LinkView(Struct, frozen=True, kw_only=True):
    """Measured state of one link of a path."""

    expected_s: float
    """Predicted time to send this KV, including the wait for KV that is under way on the link."""
    is_measured: bool
    """False: the prediction uses the configuration only."""
    failed_ago_s: float = math.inf
    """Time since the last failure on the link, if no transfer has succeeded since."""


class HandoffView(Struct, frozen=True, kw_only=True):
    """A request whose KV must move to another host, and the predicted cost of each path."""

    request: Request
    tokens: int
    """Tokens whose KV the target lacks."""
    pooled_tokens: int
    """Leading part of `tokens` whose KV the remote pool already has."""
    direct: LinkView
    put: LinkView
    """Link from the source to the pool, for the KV that the pool lacks. `expected_s` is 0 if it lacks none."""
    get: LinkView
    """Link from the pool to the target."""
    run_ratio: float
    """Share of the KV in one run. Runs are pipelined: the target reads one while the source writes the next."""
    rest_s: float
    """Time to recompute the tokens that fill no block: only full blocks go through the pool."""


class PathChosen(Struct, frozen=True, tag=True):
    """The policy has chosen a path for a request's KV, between hosts that share a tier."""

    handoff: HandoffView
    path: HandoffPath
