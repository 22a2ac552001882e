"""How much of a prompt need not be computed: what the arena has, and what reading from the tiers below adds."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from baton.core.ports import CostModel
from baton.core.types import ClusterView, Request, TierHit, WorkerView


class Prefix(Struct, frozen=True, gc=False):
    """Leading tokens of a prompt that need no work on a worker, and what they cost there."""

    tokens: int
    load_s: float
    """Until they are in the arena. 0: they are."""
    ttft_s: float
    """When the rest is computed too, behind what waits for the worker."""


def best_prefix(
    request: Request, held_tokens: int, tier_hits: Sequence[TierHit], cost: CostModel, *, wait_s: float = 0.0
) -> Prefix:
    """Choose how much of a prompt is read from tiers, so that its first token comes soonest; if all is equal, none.

    `wait_s`: what the worker has to compute before. Reading happens meanwhile. `cost`: of the worker's hardware.
    Later tokens are dearer to compute than earlier ones and no dearer to read: so who gains by reading some of one tier
    gains most by reading all that it has, and only the ends of `tier_hits` have to be looked at.
    """

    def prefix(tokens: int, load_s: float) -> Prefix:
        rest_s = cost.prefill_s(new_tokens=max(0, request.prompt_tokens - tokens), cached_tokens=tokens)
        return Prefix(tokens, load_s, max(wait_s, load_s) + rest_s)

    best = prefix(held_tokens, 0.0)
    for hit in tier_hits:
        if hit.tokens > best.tokens:
            best = min(best, prefix(hit.tokens, hit.load_s), key=lambda choice: choice.ttft_s)
    return best


def prefix_on(
    worker: WorkerView, request: Request, cluster: ClusterView, cost: CostModel, *, wait_s: float = 0.0
) -> Prefix:
    """Choose how much of a prompt is read on this worker's host. See `best_prefix`."""
    held_tokens = cluster.prefix_hit_tokens.get(worker.host, 0)
    return best_prefix(
        request, held_tokens, cluster.tier_hits.get(worker.host, ()), cost.on(worker.kind), wait_s=wait_s
    )
