"""How a preempted request gets its KV back: read from the tiers below the arena, or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from baton.core.config import Preemption
from baton.core.ports import CostModel
from baton.core.types import TierHit


def read_back_tokens(
    way: Preemption, tokens: int, held_tokens: int, tier_hits: Sequence[TierHit], cost: CostModel, *, beside: int
) -> int:
    """Choose how many leading tokens are read or in the arena already: `held_tokens`, where nothing shall be read.

    `tokens`: in the full blocks that it had. `cost`: of the worker that it goes on on. `beside`: other requests there.
    The cheaper way costs all of them together the fewest seconds: a read holds up this request alone, what is
    computed goes into steps that the others wait for.
    """

    def lost_s(hit: TierHit) -> float:
        # At least one token more is computed whatever is read: a read never spares a step, only tokens of it.
        rest_s = cost.prefill_s(new_tokens=tokens + 1 - hit.tokens, cached_tokens=hit.tokens)
        return hit.load_s + (1 + beside) * rest_s

    choices = [TierHit(held_tokens, 0.0), *tier_hits]
    match way:
        case "recompute":
            return held_tokens
        case "swap":
            return choices[-1].tokens
        case "cheaper":
            return min(choices, key=lost_s).tokens
        case _:
            assert_never(way)
