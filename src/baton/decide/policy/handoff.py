"""Handoff: the path of a request's KV between hosts (direct or pool), and the worker that samples the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from baton.core.handoff_paths import HandoffPath, HandoffView
from baton.core.ports import CostModel
from baton.core.types import Request

FirstTokenWorker = Literal["prefill", "decode"]
"""The worker that samples the first token of a request."""


@runtime_checkable
class HandoffPolicy(Protocol):
    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        """Choose the path of a request's KV. Called only if both hosts share a tier.

        Called when a prompt starts whose blocks may be streamed, and again at the handoff. If the chosen path fails,
        the other one is tried; blocks that neither path delivers are recomputed.
        """
        ...


@dataclass(frozen=True, slots=True)
class DirectHandoff:
    """Always copy from host to host."""

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        return "direct"


@dataclass(frozen=True, slots=True)
class PoolHandoff:
    """Always copy through the pool: the source may leave as soon as it has written its blocks."""

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        return "central"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestHandoff:
    """Copy directly, unless the pool is measured to be clearly faster or the direct path fails."""

    gain_ratio: float = 0.8
    """The pool is used if it takes at most this share of the direct time. The margin covers prediction errors."""
    avoid_s: float = 10.0
    """A path is avoided for this long after a failure, unless the other path has failed as well."""

    def choose_path(self, handoff: HandoffView) -> HandoffPath:
        direct, links = handoff.direct, (handoff.put, handoff.get)
        has_pool_failed = min(link.failed_ago_s for link in links) < self.avoid_s
        if direct.failed_ago_s < self.avoid_s or has_pool_failed:
            return "direct" if has_pool_failed else "central"
        if not direct.is_measured:
            return "direct"
        return "central" if central_s(handoff) < self.gain_ratio * direct.expected_s else "direct"


def central_s(handoff: HandoffView) -> float:
    """Predict a handoff through the pool: blocks are written and read in overlapping runs, the rest is recomputed."""
    shorter_s, longer_s = sorted(link.expected_s for link in (handoff.put, handoff.get))
    return longer_s + shorter_s * handoff.run_ratio + handoff.rest_s


@runtime_checkable
class FirstTokenPolicy(Protocol):
    def first_token_by(self, request: Request, cost: CostModel) -> FirstTokenWorker:
        """Choose the worker that samples the first token of a request that is handed off.

        Called when a prompt goes to a prefill worker. Not called if the client wants prompt log probabilities or an
        embedding: then the prefill worker samples, since only it computes the whole prompt.
        """
        ...


@dataclass(frozen=True, slots=True)
class FirstTokenByPrefill:
    """The prefill worker samples the first token, which does not wait for the handoff."""

    def first_token_by(self, request: Request, cost: CostModel) -> FirstTokenWorker:
        return "prefill"


@dataclass(frozen=True, slots=True)
class FirstTokenByDecode:
    """The decode worker samples the first token: KV of all prompt tokens but the last is handed off.

    The first token waits for the handoff; no later token does.
    """

    def first_token_by(self, request: Request, cost: CostModel) -> FirstTokenWorker:
        return "decode"
