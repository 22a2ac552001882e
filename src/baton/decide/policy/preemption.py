"""Recovery of a preempted request's KV: swap it in from the tiers, or recompute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from baton.core.config import Preemption
from baton.core.ports import CostModel
from baton.core.types import TierHit


def read_back_tokens(
    preemption: Preemption, tokens: int, held_tokens: int, tier_hits: Sequence[TierHit], cost: CostModel, *, beside: int
) -> int:
    """Return the leading tokens that the request has after a swap-in; `held_tokens` if no block is read.

    `tokens`: tokens of the full blocks that the request had. `cost`: of the worker that continues the request.
    `beside`: other requests on that worker. `cheaper` minimizes the seconds lost by all requests together: a read
    delays this request alone, a recompute lengthens steps that the others wait for.
    """

    def lost_s(hit: TierHit) -> float:
        # At least one token is computed in any case, so a read never saves a whole step, only tokens of it.
        rest_s = cost.prefill_s(new_tokens=tokens + 1 - hit.tokens, cached_tokens=hit.tokens)
        return hit.load_s + (1 + beside) * rest_s

    choices = [TierHit(held_tokens, 0.0), *tier_hits]
    match preemption:
        case "recompute":
            return held_tokens
        case "swap":
            return choices[-1].tokens
        case "cheaper":
            return min(choices, key=lost_s).tokens
        case _:
            assert_never(preemption)
