"""Handoff: which way a request's KV changes hosts, directly or by a pool; and who draws its first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from baton.core.ports import CostModel
from baton.core.types import Request
from baton.core.ways import HandoffView, Way

Teller = Literal["prefill", "decode"]
"""Who draws a request's first token."""


@runtime_checkable
class HandoffPolicy(Protocol):
    def way(self, handoff: HandoffView) -> Way:
        """Choose the way of a request's KV. Asked only where a tier is shared by both hosts.

        Asked when a prompt is begun whose blocks may be sent ahead, and again when the request goes on elsewhere. A way
        that fails is left for the other one, and what neither brings is computed.
        """
        ...


@dataclass(frozen=True, slots=True)
class DirectHandoff:
    """From host to host: one way, and the pool is left to what it keeps."""

    def way(self, handoff: HandoffView) -> Way:
        """See `HandoffPolicy.way`."""
        return "direct"


@dataclass(frozen=True, slots=True)
class PoolHandoff:
    """By the pool: the source is free as soon as it has put, and may die then."""

    def way(self, handoff: HandoffView) -> Way:
        """See `HandoffPolicy.way`."""
        return "central"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheapestHandoff:
    """Direct, unless measured costs say otherwise: the pool is clearly quicker, or the direct way fails."""

    gain_ratio: float = 0.8
    """By the pool it may take at most this share of the direct way's time: predictions err, and it writes besides."""
    ill_s: float = 10.0
    """A way on which something has failed is avoided for so long, where the other has not failed."""

    def way(self, handoff: HandoffView) -> Way:
        """See `HandoffPolicy.way`."""
        direct, roads = handoff.direct, (handoff.put, handoff.get)
        is_pool_ill = min(road.failed_ago_s for road in roads) < self.ill_s
        if direct.failed_ago_s < self.ill_s or is_pool_ill:
            return "direct" if is_pool_ill else "central"
        if not direct.is_measured:
            return "direct"
        return "central" if central_s(handoff) < self.gain_ratio * direct.expected_s else "direct"


def central_s(handoff: HandoffView) -> float:
    """Predict how long a request's KV takes by the pool: put and taken run by run, and its rest computed."""
    shorter_s, longer_s = sorted(road.expected_s for road in (handoff.put, handoff.get))
    return longer_s + shorter_s * handoff.run_ratio + handoff.rest_s


@runtime_checkable
class FirstTokenPolicy(Protocol):
    def teller(self, request: Request, cost: CostModel) -> Teller:
        """Choose who draws the first token of a request that is handed off.

        Asked when its prompt is given to a prefill worker; not where the prompt's own log probabilities or its vector
        are wanted, which come with the first token from whoever has seen the whole prompt.
        """
        ...


@dataclass(frozen=True, slots=True)
class FirstTokenByPrefill:
    """Whoever computes the prompt: the first token does not wait for the handoff."""

    def teller(self, request: Request, cost: CostModel) -> Teller:
        """See `FirstTokenPolicy.teller`."""
        return "prefill"


@dataclass(frozen=True, slots=True)
class FirstTokenByDecode:
    """Whoever goes on: prefill needs no sampler, and all but the prompt's last token is handed over.

    The first token waits for the handoff; from it on no gap between tokens does.
    """

    def teller(self, request: Request, cost: CostModel) -> Teller:
        """See `FirstTokenPolicy.teller`."""
        return "decode"
